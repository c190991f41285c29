import { isObject, show } from './config-fields.ts'
import type { ConfigFields } from './config-fields.ts'

/** Refuses, by field, what config.json asks for and the forward pass does not do: computing on without it would be silently wrong. */
export function refuseUnsupported (fields: ConfigFields, layers: number, contextLength: number): void {
  const quantization = fields.get('quantization_config') ?? fields.get('compression_config')
  if (quantization !== undefined) {
    const method = isObject(quantization) ? quantization.quant_method : quantization
    const field = fields.get('quantization_config') === undefined ? 'compression_config' : 'quantization_config'
    throw fields.error(
      field,
      `quantised checkpoints (${show(method)}) are not supported; serve the bfloat16, float16 or float32 one`
    )
  }
  if (fields.boolean('mlp_bias', false)) throw fields.error('mlp_bias', 'biases in the MLP are not supported')
  const act = fields.string('hidden_act') ?? 'silu'
  if (act !== 'silu' && act !== 'swish') {
    throw fields.error('hidden_act', `${show(act)} is not supported; refit knows silu`)
  }
  refuseSlidingWindow(fields, layers, contextLength)
}

function refuseSlidingWindow (fields: ConfigFields, layers: number, contextLength: number): void {
  const types = fields.get('layer_types')
  if (types !== undefined) {
    if (!Array.isArray(types)) throw fields.error('layer_types', `expected a list of strings, got ${show(types)}`)
    const at = types.findIndex(type => type !== 'full_attention')
    if (at !== -1) {
      throw fields.error('layer_types', `layer ${at} wants ${show(types[at])}; refit knows "full_attention"`)
    }
    return
  }
  if (!fields.boolean('use_sliding_window', false) || fields.get('sliding_window') === undefined) return
  const window = fields.int('sliding_window', 0, Number.MAX_SAFE_INTEGER)
  // Layers from max_window_layers on slide; a window as long as the context hides nothing.
  const from = fields.int('max_window_layers', 0, Number.MAX_SAFE_INTEGER, 0)
  if (window >= contextLength || from >= layers) return
  throw fields.error(
    'use_sliding_window',
    `a sliding window (${window} tokens, layers ${from} to ${layers - 1}) is not supported`
  )
}
