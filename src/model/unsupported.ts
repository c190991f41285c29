import { isObject, show } from './config-fields.ts'
import type { ConfigFields } from './config-fields.ts'
import type { Family } from './families.ts'

/**
 * Refuses fields of config.json that request something that the forward pass does not compute. Without the refusal the
 * output would be silently wrong.
 */
export function refuseUnsupported (fields: ConfigFields, family: Family, layers: number, contextLength: number): void {
  const quantization = fields.get('quantization_config') ?? fields.get('compression_config')
  if (quantization !== undefined) {
    const method = isObject(quantization) ? quantization.quant_method : quantization
    const field = fields.get('quantization_config') === undefined ? 'compression_config' : 'quantization_config'
    throw fields.error(
      field,
      `quantised checkpoints (${show(method)}) are not supported; serve the one that is not quantised`
    )
  }
  if (fields.boolean('mlp_bias', false)) throw fields.error('mlp_bias', 'biases in the MLP are not supported')
  refuseLayerTypes(fields)
  if (family.slidingWindow === 'use_sliding_window') refuseSwitchedWindow(fields, layers, contextLength)
  else refuseDefaultWindow(fields, family.slidingWindow, contextLength)
}

function refuseLayerTypes (fields: ConfigFields): void {
  const types = fields.get('layer_types')
  if (types === undefined) return
  if (!Array.isArray(types)) throw fields.error('layer_types', `expected a list of strings, got ${show(types)}`)
  const at = types.findIndex(type => type !== 'full_attention')
  if (at !== -1) throw fields.error('layer_types', `layer ${at} is ${show(types[at])}; refit knows "full_attention"`)
}

/** Families with the switch `use_sliding_window`. If `layer_types` is given, transformers reads only that. */
function refuseSwitchedWindow (fields: ConfigFields, layers: number, contextLength: number): void {
  if (fields.get('layer_types') !== undefined) return
  if (!fields.boolean('use_sliding_window', false) || fields.get('sliding_window') === undefined) return
  const window = fields.int('sliding_window', 0, Number.MAX_SAFE_INTEGER)
  // The layers from max_window_layers on have the window. A window that is as long as the context has no effect.
  const from = fields.int('max_window_layers', 0, Number.MAX_SAFE_INTEGER, 0)
  if (window >= contextLength || from >= layers) return
  throw fields.error(
    'use_sliding_window',
    `a sliding window (${window} tokens, layers ${from} to ${layers - 1}) is not supported`
  )
}

/** Families without a switch: the window holds unless `sliding_window` is null; an absent field means the default. */
function refuseDefaultWindow (fields: ConfigFields, fallback: number, contextLength: number): void {
  if (fields.has('sliding_window') && fields.get('sliding_window') === undefined) return
  const window = fields.int('sliding_window', 0, Number.MAX_SAFE_INTEGER, fallback)
  if (window >= contextLength) return
  const origin = fields.has('sliding_window') ? '' : ', the default of an absent field'
  throw fields.error(
    'sliding_window',
    `a sliding window (${window} tokens${origin}) is not supported; ` +
      'refit runs the models whose config.json has null here'
  )
}
