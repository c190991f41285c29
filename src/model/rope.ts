import { ConfigFields, isObject, show } from './config-fields.ts'
import type { Architecture } from './architecture.ts'

type Rope = Pick<Architecture, 'ropeInvFreq' | 'ropeScale'>

const TYPES = ['default', 'linear', 'llama3', 'yarn'] as const
const DEFAULT_THETA = 10_000
const MAX_POSITIONS = 2 ** 30

/**
 * RoPE of a model: `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (transformers 4). Formulas as
 * transformers' modeling_rope_utils.py has them, in float64; "RoPE", "llama3" of Llama 3.1, "yarn" of arXiv 2309.00071.
 */
export function parseRope (config: ConfigFields, headDim: number, contextLength: number): Rope {
  const rope = ropeFields(config)
  const theta = rope.number('rope_theta', 0, config.number('rope_theta', 0, DEFAULT_THETA))
  for (const fields of [rope, config]) {
    if (fields.number('partial_rotary_factor', 0, 1) !== 1) {
      throw fields.error(
        'partial_rotary_factor',
        `${show(fields.get('partial_rotary_factor'))} is not supported: refit rotates whole heads (1)`
      )
    }
  }
  const type = rope.string('rope_type') ?? rope.string('type') ?? 'default'
  const invFreq = Float64Array.from({ length: headDim / 2 }, (_, i) => theta ** (-2 * i / headDim))
  const original = (): number =>
    config.int(
      'original_max_position_embeddings',
      1,
      MAX_POSITIONS,
      rope.int('original_max_position_embeddings', 1, MAX_POSITIONS, contextLength)
    )
  switch (type) {
    case 'default':
      return { ropeInvFreq: invFreq, ropeScale: 1 }
    case 'linear': {
      const factor = rope.number('factor', 0)
      return { ropeInvFreq: invFreq.map(f => f / factor), ropeScale: 1 }
    }
    case 'llama3':
      return { ropeInvFreq: llama3(invFreq, rope, original()), ropeScale: 1 }
    case 'yarn':
      return yarn(invFreq, rope, theta, original(), contextLength)
    default:
      throw rope.error(
        rope.get('rope_type') === undefined ? 'type' : 'rope_type',
        `${show(type)} is not supported; refit knows ${TYPES.join(', ')}`
      )
  }
}

function ropeFields (config: ConfigFields): ConfigFields {
  // transformers reads both fields; if both are present, rope_scaling wins there too.
  for (const name of ['rope_scaling', 'rope_parameters']) {
    const value = config.get(name)
    if (value === undefined) continue
    if (!isObject(value)) throw config.error(name, `expected an object, got ${show(value)}`)
    // Configs with layer_types may nest one object per type. unsupported.ts refuses the types other than full
    // attention.
    const nested = value.full_attention
    if (isObject(nested)) return new ConfigFields(nested, `${name}.full_attention.`)
    return new ConfigFields(value, `${name}.`)
  }
  return new ConfigFields({})
}

function llama3 (invFreq: Float64Array, rope: ConfigFields, original: number): Float64Array {
  const factor = rope.number('factor', 0)
  const low = rope.number('low_freq_factor', 0)
  const high = rope.number('high_freq_factor', 0)
  if (high <= low) throw rope.error('high_freq_factor', `expected more than low_freq_factor (${low}), got ${high}`)
  return invFreq.map(f => {
    const wavelength = 2 * Math.PI / f
    if (wavelength < original / high) return f
    if (wavelength > original / low) return f / factor
    const smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * f / factor + smooth * f
  })
}

function yarn (
  invFreq: Float64Array,
  rope: ConfigFields,
  theta: number,
  original: number,
  contextLength: number
): Rope {
  if (theta === 1) throw rope.error('rope_theta', 'expected a base other than 1 for yarn')
  const half = invFreq.length
  const dim = half * 2
  const factor = rope.number('factor', 0, contextLength / original)
  // 0 means "not set" for these four, as in Python's `or`.
  const orDefault = (name: string, fallback: number): number =>
    rope.get(name) === 0 ? fallback : rope.number(name, 0, fallback)
  const betaFast = orDefault('beta_fast', 32)
  const betaSlow = orDefault('beta_slow', 1)
  const correction = (rotations: number): number =>
    dim * Math.log(original / (rotations * 2 * Math.PI)) / (2 * Math.log(theta))
  const truncate = rope.boolean('truncate', true)
  let low = correction(betaFast)
  let high = correction(betaSlow)
  if (truncate) {
    low = Math.floor(low)
    high = Math.ceil(high)
  }
  low = Math.max(low, 0)
  high = Math.min(high, dim - 1)
  if (low === high) high += 0.001
  return {
    ropeInvFreq: invFreq.map((f, i) => {
      const interpolated = Math.min(1, Math.max(0, (i - low) / (high - low)))
      return f / factor * interpolated + f * (1 - interpolated)
    }),
    ropeScale: yarnScale(rope, factor)
  }
}

function yarnScale (rope: ConfigFields, factor: number): number {
  if (rope.get('attention_factor') !== undefined) return rope.number('attention_factor', 0)
  const optional = (name: string): number | undefined => (rope.get(name) ?? 0) === 0 ? undefined : rope.number(name, 0)
  const mscale = (m: number): number => factor <= 1 ? 1 : 0.1 * m * Math.log(factor) + 1
  const [numerator, denominator] = [optional('mscale'), optional('mscale_all_dim')]
  if (numerator === undefined || denominator === undefined) return mscale(1)
  return mscale(numerator) / mscale(denominator)
}
