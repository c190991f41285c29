import { RefitError } from '../errors.ts'
import type { SamplingParams } from '../contract/rollout-engine.ts'

/** Sampling is greedy below it, because division by a smaller number would overflow. */
export const GREEDY_TEMPERATURE = 1e-6
/** A logit divided by this and by the lowest temperature is still far from float32's limit. */
const LEAST_REPETITION = 1e-6

export type SamplingNumbers = Pick<
  SamplingParams,
  'temperature' | 'topP' | 'minP' | 'frequencyPenalty' | 'presencePenalty' | 'repetitionPenalty' | 'logitBias'
>

/**
 * Throws INVALID_REQUEST, naming the field with `prefix` before it, for numbers that a sampler cannot use. Samplers
 * compute in float32, where 1e39 is infinite and 1e-46 is 0. One bad row makes the whole step fail, with every request
 * in it.
 */
export function checkSampling (values: SamplingNumbers, prefix = ''): void {
  const check = (holds: boolean, field: string, message: string): void => {
    if (!holds) throw new RefitError('INVALID_REQUEST', message, { param: prefix + field })
  }
  const { temperature, topP, minP, frequencyPenalty, presencePenalty, repetitionPenalty, logitBias } = values
  check(temperature >= 0, 'temperature', `temperature must be non-negative, got ${temperature}.`)
  check(isFloat(temperature), 'temperature', `temperature must be a finite float32, got ${temperature}.`)
  check(Math.fround(topP) > 0 && topP <= 1, 'top_p', `top_p must be in (0, 1], got ${topP}.`)
  check(minP >= 0 && minP <= 1, 'min_p', `min_p must be in [0, 1], got ${minP}.`)
  check(
    Math.abs(frequencyPenalty) <= 2,
    'frequency_penalty',
    `frequency_penalty must be in [-2, 2], got ${frequencyPenalty}.`
  )
  check(
    Math.abs(presencePenalty) <= 2,
    'presence_penalty',
    `presence_penalty must be in [-2, 2], got ${presencePenalty}.`
  )
  check(
    repetitionPenalty >= LEAST_REPETITION && repetitionPenalty <= 2,
    'repetition_penalty',
    `repetition_penalty must be in [0.000001, 2], got ${repetitionPenalty}.`
  )
  const stray = logitBias.find(([, bias]) => !isFloat(bias))
  if (stray !== undefined) {
    check(false, 'logit_bias', `logit_bias must have finite float32 values, got ${stray[1]} for ${stray[0]}.`)
  }
}

function isFloat (value: number): boolean {
  return Number.isFinite(Math.fround(value))
}
