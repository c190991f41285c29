import type { DType } from '../native/dtypes.ts'
import { ARCHITECTURES } from './architecture.ts'
import type { Architecture, ArchitectureName, Moe } from './architecture.ts'
import { ConfigFields, configError, isObject, show } from './config-fields.ts'
import { refuseUnsupported } from './unsupported.ts'
import { parseRope } from './rope.ts'
import { parseTokenIds } from './token-ids.ts'

const MODEL_TYPES: Record<ArchitectureName, string> = {
  LlamaForCausalLM: 'llama',
  Qwen2ForCausalLM: 'qwen2',
  Qwen3ForCausalLM: 'qwen3',
  Qwen3MoeForCausalLM: 'qwen3_moe'
}
const DEFAULT_CONTEXT: Record<ArchitectureName, number> = {
  LlamaForCausalLM: 2048,
  Qwen2ForCausalLM: 32_768,
  Qwen3ForCausalLM: 32_768,
  Qwen3MoeForCausalLM: 32_768
}
/** Qwen3Config has a fixed default; the others derive it. */
const QWEN3_HEAD_DIM = 128
// Far above any model; they keep a config of lies from making tables that fill the memory.
const MAX_WIDTH = 2 ** 24
const MAX_LAYERS = 1024
const MAX_EXPERTS = 4096
const DTYPES: readonly DType[] = ['bfloat16', 'float16', 'float32']

/**
 * config.json, as transformers 4 or 5 writes it, and generation_config.json (may be absent), both parsed.
 * Defaults are those of the transformers class of the architecture. Throws MODEL_CONFIG, naming the field.
 */
export function parseModelConfig (config: unknown, generationConfig?: unknown): Architecture {
  if (!isObject(config)) throw configError('(whole file)', `expected a JSON object, got ${show(config)}`)
  const fields = new ConfigFields(config)
  const name = architectureName(fields)
  const layers = fields.int('num_hidden_layers', 1, MAX_LAYERS)
  const contextLength = fields.int('max_position_embeddings', 1, 2 ** 30, DEFAULT_CONTEXT[name])
  refuseUnsupported(fields, layers, contextLength)
  const hiddenSize = fields.int('hidden_size', 1, MAX_WIDTH)
  const vocabSize = fields.int('vocab_size', 1, MAX_WIDTH)
  const { heads, kvHeads, headDim } = attention(fields, name, hiddenSize)
  const moe = name === 'Qwen3MoeForCausalLM' ? parseMoe(fields, layers) : null
  const attentionBias = name !== 'Qwen2ForCausalLM' && fields.boolean('attention_bias', false)
  return {
    name,
    modelType: MODEL_TYPES[name],
    hiddenSize,
    layers,
    heads,
    kvHeads,
    headDim,
    intermediateSize: fields.int('intermediate_size', 1, MAX_WIDTH),
    vocabSize,
    rmsNormEps: fields.number('rms_norm_eps', 0, 1e-6),
    tieWordEmbeddings: fields.boolean('tie_word_embeddings', false),
    // Qwen2 has biases on q, k and v by definition, with no field that says so.
    qkvBias: name === 'Qwen2ForCausalLM' || attentionBias,
    oBias: attentionBias,
    qkNorm: name === 'Qwen3ForCausalLM' || name === 'Qwen3MoeForCausalLM',
    contextLength,
    rope: parseRope(fields, headDim, contextLength),
    moe,
    dtype: parseDtype(fields),
    ...parseTokenIds(fields, generationConfig, name)
  }
}

function architectureName (fields: ConfigFields): ArchitectureName {
  const supported = `refit runs ${ARCHITECTURES.join(', ')}`
  const modelType = fields.string('model_type')
  const list = fields.get('architectures') ?? ARCHITECTURES.filter(a => MODEL_TYPES[a] === modelType)
  if (!Array.isArray(list) || list.length === 0) {
    throw fields.error(
      'architectures',
      `expected a list with the name of the architecture, got ${show(fields.get('architectures'))}; ${supported}`
    )
  }
  const name = ARCHITECTURES.find(a => a === list[0])
  if (name === undefined || list.length !== 1) {
    throw fields.error(
      'architectures',
      `${
        show(
          list.length === 1
            ? list[0]
            : list
        )
      } is not supported; ${supported}`
    )
  }
  if (modelType !== undefined && modelType !== MODEL_TYPES[name]) {
    throw fields.error('model_type', `${name} goes with ${show(MODEL_TYPES[name])}, got ${show(modelType)}`)
  }
  return name
}

function attention (
  fields: ConfigFields,
  name: ArchitectureName,
  hiddenSize: number
): Pick<Architecture, 'heads' | 'kvHeads' | 'headDim'> {
  const heads = fields.int('num_attention_heads', 1, MAX_WIDTH)
  // null, and for Llama an absent field too, means multi-head attention; the Qwen defaults are numbers that fit one size only.
  const multiHead = name === 'LlamaForCausalLM' || (name !== 'Qwen3MoeForCausalLM' && fields.has('num_key_value_heads'))
  const kvHeads = fields.int('num_key_value_heads', 1, heads, multiHead ? heads : undefined)
  if (heads % kvHeads !== 0) {
    throw fields.error('num_key_value_heads', `${heads} attention heads are not a multiple of ${kvHeads} KV heads`)
  }
  if (fields.get('head_dim') === undefined && name !== 'Qwen3ForCausalLM' && hiddenSize % heads !== 0) {
    throw fields.error(
      'head_dim',
      `is missing, and hidden_size ${hiddenSize} is not a multiple of ${heads} attention heads`
    )
  }
  const headDim = fields.int('head_dim', 1, 4096, name === 'Qwen3ForCausalLM' ? QWEN3_HEAD_DIM : hiddenSize / heads)
  if (headDim % 2 !== 0) throw fields.error('head_dim', `RoPE needs an even number, got ${headDim}`)
  if (heads * headDim > MAX_WIDTH) {
    throw fields.error('num_attention_heads', `${heads} heads of ${headDim} are wider than ${MAX_WIDTH}`)
  }
  return { heads, kvHeads, headDim }
}

function parseMoe (fields: ConfigFields, layers: number): Moe | null {
  // transformers 5 writes num_local_experts.
  const names = ['num_experts', 'num_local_experts'].filter(n => fields.get(n) !== undefined)
  const [experts, other] = (names.length === 0 ? ['num_experts'] : names).map(n => fields.int(n, 0, MAX_EXPERTS))
  if (other !== undefined && other !== experts) {
    throw fields.error('num_local_experts', `${other} contradicts num_experts ${experts}`)
  }
  if (experts === 0) return null
  const step = fields.int('decoder_sparse_step', 1, MAX_WIDTH, 1)
  const dense = new Set(fields.ints('mlp_only_layers', 0, MAX_WIDTH))
  const sparse = Array.from({ length: layers }, (_, i) => !dense.has(i) && (i + 1) % step === 0)
  if (!sparse.includes(true)) return null
  return {
    experts: experts!,
    expertsPerToken: fields.int('num_experts_per_tok', 1, experts!),
    intermediateSize: fields.int('moe_intermediate_size', 1, MAX_WIDTH),
    normTopkProb: fields.boolean('norm_topk_prob', false),
    sparse
  }
}

function parseDtype (fields: ConfigFields): DType {
  const field = fields.get('dtype') === undefined ? 'torch_dtype' : 'dtype'
  const name = (fields.string(field) ?? 'bfloat16').replace(/^torch\./, '')
  const dtype = DTYPES.find(known => known === name)
  if (dtype === undefined) throw fields.error(field, `${show(name)} is not supported; refit reads ${DTYPES.join(', ')}`)
  return dtype
}
