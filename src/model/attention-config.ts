import type { Architecture } from './architecture.ts'
import type { ConfigFields } from './config-fields.ts'
import type { Family } from './families.ts'
import { MAX_WIDTH } from './limits.ts'

/** Heads and biases of attention. Throws MODEL_CONFIG if the numbers do not fit each other. */
export function parseAttention (
  fields: ConfigFields,
  family: Family,
  hiddenSize: number
): Pick<Architecture, 'heads' | 'kvHeads' | 'headDim' | 'qkvBias' | 'oBias'> {
  const heads = fields.int('num_attention_heads', 1, MAX_WIDTH)
  const kvHeads = parseKvHeads(fields, family, heads)
  if (family.headDim === null && fields.get('head_dim') === undefined && hiddenSize % heads !== 0) {
    throw fields.error(
      'head_dim',
      `is missing, and hidden_size ${hiddenSize} is not a multiple of ${heads} attention heads`
    )
  }
  const headDim = fields.int('head_dim', 1, 4096, family.headDim ?? hiddenSize / heads)
  if (headDim % 2 !== 0) throw fields.error('head_dim', `RoPE needs an even number, got ${headDim}`)
  if (heads * headDim > MAX_WIDTH) {
    throw fields.error('num_attention_heads', `${heads} heads of ${headDim} are wider than ${MAX_WIDTH}`)
  }
  const configured = family.attentionBias === 'configured' && fields.boolean('attention_bias', false)
  return { heads, kvHeads, headDim, qkvBias: configured || family.attentionBias === 'qkv', oBias: configured }
}

function parseKvHeads (fields: ConfigFields, { multiHead }: Family, heads: number): number {
  const field = 'num_key_value_heads'
  const isMultiHead = multiHead === 'null or absent' || (multiHead === 'null' && fields.has(field))
  const kvHeads = fields.int(field, 1, heads, isMultiHead ? heads : undefined)
  if (heads % kvHeads !== 0) {
    throw fields.error(field, `${heads} attention heads are not a multiple of ${kvHeads} KV heads`)
  }
  return kvHeads
}
