import { isDType, listDTypes } from '../native/dtypes.ts'
import type { DType } from '../native/dtypes.ts'
import type { Activation } from '../native/recipe.ts'
import type { Architecture } from './architecture.ts'
import { parseAttention } from './attention-config.ts'
import { ConfigFields, configError, isObject, show } from './config-fields.ts'
import { parseExperts } from './expert-config.ts'
import { ARCHITECTURES, FAMILIES, familyOf } from './families.ts'
import type { ArchitectureName } from './families.ts'
import { MAX_LAYERS, MAX_WIDTH } from './limits.ts'
import { parseRope } from './rope.ts'
import { parseTokenIds } from './token-ids.ts'
import { refuseUnsupported } from './unsupported.ts'

/** Spellings of `hidden_act`. */
const ACTIVATIONS: ReadonlyMap<string, Activation> = new Map([
  ['silu', 'silu'],
  ['swish', 'silu'],
  ['gelu_pytorch_tanh', 'gelu_pytorch_tanh']
])

/**
 * config.json, as transformers 4 or 5 writes it, and generation_config.json (may be absent), both parsed.
 * Defaults are those of the family's config class in transformers. Throws MODEL_CONFIG, naming the field.
 */
export function parseModelConfig (config: unknown, generationConfig?: unknown): Architecture {
  if (!isObject(config)) throw configError('(whole file)', `expected a JSON object, got ${show(config)}`)
  const fields = new ConfigFields(config)
  const name = architectureName(fields)
  const family = familyOf(name)
  const layers = fields.int('num_hidden_layers', 1, MAX_LAYERS)
  const contextLength = fields.int('max_position_embeddings', 1, 2 ** 30, family.contextLength)
  refuseUnsupported(fields, family, layers, contextLength)
  const hiddenSize = fields.int('hidden_size', 1, MAX_WIDTH)
  const vocabSize = fields.int('vocab_size', 1, MAX_WIDTH)
  const attention = parseAttention(fields, family, hiddenSize)
  return {
    name,
    modelType: family.modelType,
    hiddenSize,
    layers,
    vocabSize,
    ...attention,
    ...parseExperts(fields, family, layers),
    intermediateSize: fields.int('intermediate_size', 1, MAX_WIDTH),
    rmsNormEps: fields.number('rms_norm_eps', 0, family.rmsNormEps),
    normPlacement: family.normPlacement,
    qkNorm: family.qkNorm,
    activation: parseActivation(fields),
    roundOnce: family.roundOnce,
    tieWordEmbeddings: fields.boolean('tie_word_embeddings', false),
    contextLength,
    ...parseRope(fields, attention.headDim, contextLength),
    dtype: parseDtype(fields),
    ...parseTokenIds(fields, generationConfig, family)
  }
}

function architectureName (fields: ConfigFields): ArchitectureName {
  const supported = `refit runs ${ARCHITECTURES.join(', ')}`
  const modelType = fields.string('model_type')
  const list = fields.get('architectures') ?? ARCHITECTURES.filter(a => FAMILIES[a].modelType === modelType)
  if (!Array.isArray(list) || list.length === 0) {
    throw fields.error(
      'architectures',
      `expected a list with the name of the architecture, got ${show(fields.get('architectures'))}; ${supported}`
    )
  }
  const name = ARCHITECTURES.find(a => a === list[0])
  if (name === undefined || list.length !== 1) {
    const got = show(list.length === 1 ? list[0] : list)
    throw fields.error('architectures', `${got} is not supported; ${supported}`)
  }
  const expected = FAMILIES[name].modelType
  if (modelType !== undefined && modelType !== expected) {
    throw fields.error('model_type', `${name} goes with ${show(expected)}, got ${show(modelType)}`)
  }
  return name
}

function parseActivation (fields: ConfigFields): Activation {
  const name = fields.string('hidden_act') ?? 'silu'
  const activation = ACTIVATIONS.get(name)
  if (activation !== undefined) return activation
  throw fields.error('hidden_act', `${show(name)} is not supported; refit knows ${[...ACTIVATIONS.keys()].join(', ')}`)
}

function parseDtype (fields: ConfigFields): DType {
  const field = fields.get('dtype') === undefined ? 'torch_dtype' : 'dtype'
  const name = (fields.string(field) ?? 'bfloat16').replace(/^torch\./, '')
  if (!isDType(name)) throw fields.error(field, `${show(name)} is not supported; refit reads ${listDTypes()}`)
  return name
}
