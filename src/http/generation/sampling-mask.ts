import { Type } from 'typebox'
import { GREEDY_TEMPERATURE } from '../../engine/check-sampling.ts'
import type { SamplingParams, Scored } from '../../contract/rollout-engine.ts'
import type { Sample } from './sample.ts'
import { LazyList } from '../json-parts.ts'
import { base64 } from './routed-experts.ts'

// Sampling masks: the tokens that top_k, top_p and min_p kept at each position of an output. Trainers compute their
// probabilities over the same tokens (DeepSeek-AI, 2025, arXiv:2512.02556). One list of kept sets in three spellings.

/** SGLang's `meta_info`. */
export const samplingMaskFields = {
  output_token_sampling_mask: Type.Optional(
    Type.Array(Type.Array(Type.Integer()), { description: 'Per output token: the ids that were kept, best first.' })
  ),
  output_token_sampling_logprobs: Type.Optional(
    Type.Array(Type.Union([Type.Number(), Type.Null()]), { description: 'Logprobs of the tokens among those ids.' })
  ),
  top_p_token_ids: Type.Optional(Type.String({ description: "Base64 of int32: the same ids in slime's form." })),
  top_p_token_offsets: Type.Optional(
    Type.String({ description: 'Base64 of int32: where the ids of each token begin; the last entry is their number.' })
  )
}

/** The spellings that a request wants. */
export interface WantedMasks {
  /** SGLang's. */
  lists: boolean
  /** slime's. */
  packed: boolean
}

/** The masks of the tokens from `from` on, for `meta_info`. */
export function sglangMasks ({ kept }: Sample, from: number, { lists, packed }: WantedMasks): Record<string, unknown> {
  const sets = kept.slice(from)
  return {
    ...lists
      ? {
        output_token_sampling_mask: new LazyList(sets.length, i => Array.from(sets[i]!.ids)),
        output_token_sampling_logprobs: sets.map(({ logprob }) => logprob)
      }
      : {},
    ...packed ? packedMasks(sets) : {}
  }
}

function packedMasks (sets: Sample['kept']): Record<string, string> {
  const offsets = new Int32Array(sets.length + 1)
  for (const [i, { ids }] of sets.entries()) offsets[i + 1] = offsets[i]! + ids.length
  const all = new Int32Array(offsets[sets.length]!)
  for (const [i, { ids }] of sets.entries()) all.set(ids, offsets[i])
  return { top_p_token_ids: base64(all), top_p_token_offsets: base64(offsets) }
}

/**
 * Turns logprobs at a position of the output into logprobs among the tokens that were kept there; other tokens have
 * -Infinity. Changes nothing if no kept sets were requested.
 */
export function amongKept ({ kept, logprobs }: Sample, position: number): (scored: Scored) => Scored {
  const set = kept[position]
  if (set === undefined) return scored => scored
  const shift = set.logprob - logprobs.at(position)[0]
  const ids = new Set(set.ids)
  return ([logprob, id]) => [ids.has(id) ? Math.min(0, logprob + shift) : -Infinity, id]
}

/** False: the kept set would be the whole vocabulary. */
export function isMasked ({ temperature, topK, topP, minP }: Omit<SamplingParams, 'maxNewTokens'>): boolean {
  return temperature < GREEDY_TEMPERATURE || topK > 0 || topP < 1 || minP > 0
}
