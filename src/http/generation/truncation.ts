import { Type } from 'typebox'
import type { EngineInfo } from '../../contract/rollout-engine.ts'
import { invalid } from '../refuse.ts'
import { nullable } from '../schemas.ts'

/** vLLM's fields that shorten prompts. */
export const truncationFields = {
  truncate_prompt_tokens: nullable(
    Type.Integer({ minimum: -1 }),
    'Keep only this many tokens of the prompt; -1: as many as the context holds besides one output token.'
  ),
  truncation_side: nullable(
    Type.Union([Type.Literal('left'), Type.Literal('right')]),
    'The side on which tokens are cut (default left).'
  )
}

interface Fields {
  truncate_prompt_tokens?: number | null
  truncation_side?: 'left' | 'right' | null
}

export function truncate (ids: Int32Array, fields: Fields, { contextLength }: EngineInfo): Int32Array {
  const { truncate_prompt_tokens: most, truncation_side: side } = fields
  if (most == null) return ids
  if (most === 0 || most > contextLength) {
    throw invalid('truncate_prompt_tokens', `expected -1, or 1 to the context length ${contextLength}, got ${most}`)
  }
  const kept = most === -1 ? contextLength - 1 : most
  return side === 'right' ? ids.subarray(0, kept) : ids.slice(-kept)
}
