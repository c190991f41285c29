import type { KeptSet, TokenEvent } from '../contract/rollout-engine.ts'
import type { ErrorCode } from '../errors.ts'
import { MOST_KEPT } from '../native/step.ts'
import type { Sequence } from './sequences/sequence.ts'

/** Each id takes 4 bytes in the engine, and about 7 in a reply. */
const MAX_KEPT_IDS = 1 << 24

const ADVICE = 'set top_k, or lower top_p or temperature, so that fewer tokens are kept'

/**
 * Adds the kept set of a sequence's last token to its event. A number is the size of a set that was not reported.
 * Returns why the request cannot go on, or null.
 */
export function takeKept (
  seq: Sequence,
  event: TokenEvent,
  kept: KeptSet | number | undefined
): [ErrorCode, string] | null {
  if (kept === undefined) return null
  if (typeof kept === 'number') {
    return [
      'INVALID_REQUEST',
      `sampling mask: ${kept} tokens are kept for output token ${seq.completion}; at most ${MOST_KEPT} are reported: ` +
      ADVICE
    ]
  }
  event.kept = [kept]
  seq.keptIds += kept.ids.length
  if (seq.keptIds <= MAX_KEPT_IDS) return null
  return [
    'INVALID_REQUEST',
    `sampling mask: ${seq.keptIds} ids are kept after ${seq.completion} tokens; at most ${MAX_KEPT_IDS} are reported ` +
    `for one request: ${ADVICE}, or lower max_new_tokens`
  ]
}
