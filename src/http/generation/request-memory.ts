import { totalmem } from 'node:os'
import { RefitError } from '../../errors.ts'
import { MOST_KEPT } from '../../native/step.ts'
import type { SampleRequest } from './generation.ts'

// Tokens, scores, kept sets and experts are kept until the reply is sent, for each sample of a request.

/** An id and a logprob, in a list that doubles when it is full, and once more on their way from the scheduler. */
const SCORE_BYTES = 32
/** A score of ids that are given by position: its id and its logprob, on both threads. */
const ROW_SCORE_BYTES = 16
const TOKEN_BYTES = 24
/** A prompt's token, in the scheduler's own copy. */
const PROMPT_BYTES = 8
const KEPT_SET_BYTES = 256
/** Usual size of a kept set that only top_p or min_p bounds. */
const USUAL_KEPT = 64
const SAMPLE_BYTES = 4096
/** An expert is two bytes; the reply is written sample by sample. */
const EXPERT_BYTES = 4

/** Experts of one token; 0 if none are recorded. */
export type ExpertsPerToken = number

/** The most bytes that the results of a request can take, and what most of them are. */
export function resultBytes (
  samples: readonly SampleRequest[],
  experts: ExpertsPerToken
): { bytes: number, most: string } {
  const sums = { tokens: 0, scores: 0, masks: 0, experts: 0 }
  for (const { promptIds, sampling, logprobs, scores, kept, expertsFrom } of samples) {
    const output = sampling.maxNewTokens
    sums.tokens += SAMPLE_BYTES + promptIds.length * PROMPT_BYTES + output * TOKEN_BYTES
    if (logprobs !== null) {
      const prompt = logprobs.startLen === null ? 0 : Math.max(0, promptIds.length - logprobs.startLen)
      sums.scores += (1 + logprobs.top + logprobs.ids.length) * (output + prompt) * SCORE_BYTES
    }
    sums.scores += (scores?.ids.length ?? 0) * ROW_SCORE_BYTES
    if (kept === true) sums.masks += output * (KEPT_SET_BYTES + 4 * Math.min(sampling.topK || USUAL_KEPT, MOST_KEPT))
    if (expertsFrom !== undefined) {
      sums.experts += Math.max(0, promptIds.length + output - expertsFrom) * experts * EXPERT_BYTES
    }
  }
  const [most] = Object.entries(sums).reduce((a, b) => b[1] > a[1] ? b : a)
  return { bytes: Object.values(sums).reduce((sum, bytes) => sum + bytes, 0), most }
}

const FIELDS: Readonly<Record<string, string>> = {
  tokens: 'tokens: lower n or the number of new tokens',
  scores: 'scores: lower n, the number of new tokens, or the number of logprobs and token ids at each position',
  masks: 'sampling masks: lower n, the number of new tokens, or top_k',
  experts: 'routed experts: lower n or the number of new tokens, or report them from a later position on'
}

/** Memory that results of requests may take. */
export class RequestMemory {
  readonly #perRequest: number
  readonly #total: number
  #used = 0

  /** `total`: for all requests under way; default half of the memory of the machine. */
  constructor (perRequest: number, total = Math.max(perRequest, memoryOfMachine() / 2)) {
    this.#perRequest = perRequest
    this.#total = total
  }

  /** Throws if the kept sets of a request have become larger than they usually are. */
  checkKept (ids: number): void {
    if (ids * 4 <= this.#perRequest) return
    throw new RefitError(
      'INVALID_REQUEST',
      `sampling mask: ${ids} ids are kept so far, more than --max-request-memory holds; set top_k, or lower top_p, n ` +
        'or the number of new tokens'
    )
  }

  /** Reserves memory before a request is queued; the returned function releases it. */
  claim (samples: readonly SampleRequest[], experts: ExpertsPerToken): () => void {
    const { bytes, most } = resultBytes(samples, experts)
    if (bytes > this.#perRequest) {
      throw new RefitError(
        'INVALID_REQUEST',
        `the results of ${samples.length === 1 ? 'this request' : `${samples.length} samples`} could take ${
          mebibytes(bytes)
        } MiB, and at most ${mebibytes(this.#perRequest)} MiB are allowed for one request (--max-request-memory); ` +
          `most of them are ${FIELDS[most]}, or send several requests`
      )
    }
    if (this.#used + bytes > this.#total) {
      throw new RefitError(
        'NO_MEMORY',
        `the results of this request could take ${mebibytes(bytes)} MiB, and requests under way have ${
          mebibytes(this.#used)
        } of ${mebibytes(this.#total)} MiB: send it again later`
      )
    }
    this.#used += bytes
    let held = true
    return () => {
      if (held) this.#used -= bytes
      held = false
    }
  }
}

function memoryOfMachine (): number {
  const constrained = process.constrainedMemory()
  return constrained > 0 ? Math.min(constrained, totalmem()) : totalmem()
}

function mebibytes (bytes: number): number {
  return Math.ceil(bytes / 2 ** 20)
}
