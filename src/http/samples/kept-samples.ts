import type { FinishReason, SamplingParams } from '../../contract/rollout-engine.ts'
import type { Grammar } from '../../contract/grammar.ts'
import type { SampleRequest } from '../generation/generation.ts'
import type { Sample, VersionSpan } from '../generation/sample.ts'
import type { TextOptions } from '../generation/sampling.ts'

/** Which samples are kept: those whose request has `receipt`, or all. */
export type KeepRule = 'asked' | 'all'

/** A finished sample: everything that its receipt and the truth meter need. */
export interface KeptSample {
  id: string
  /** Milliseconds since 1970 when it ended. */
  endedAt: number
  promptIds: Int32Array
  outputIds: Int32Array
  /** Logprobs of the output; null if the request wanted none. */
  logprobs: Float64Array | null
  /** The logprobs are those before temperature, penalties and bias. */
  raw: boolean
  /** With the seed that was used. */
  sampling: SamplingParams & { seed: bigint }
  text: TextOptions
  grammar: Grammar | null
  spans: VersionSpan[]
  /** The weights that made all tokens; null if weights were written while the request was under way. */
  epoch: number | null
  lora: Sample['lora'] | null
  finish: FinishReason
  cachedTokens: number
  retractions: number
  /** The truth meter has counted it. */
  isMeasured: boolean
}

/** Bytes of a kept sample besides its lists. */
const SAMPLE_BYTES = 1024

/** The last samples, as many as fit into a number of bytes. Nothing of it runs while a sample is generated. */
export class KeptSamples {
  readonly limit: number
  readonly rule: KeepRule
  /** The oldest first. */
  readonly #samples = new Map<string, { sample: KeptSample, bytes: number }>()
  #bytes = 0

  /** `limit` 0 keeps none. */
  constructor (limit: number, rule: KeepRule) {
    this.limit = limit
    this.rule = rule
  }

  get stats (): { samples: number, bytes: number } {
    return { samples: this.#samples.size, bytes: this.#bytes }
  }

  get (id: string): KeptSample | undefined {
    return this.#samples.get(id)?.sample
  }

  /** `before` and `after`: the epoch of the weights before the request started and after it ended. */
  keep (sample: Sample, plan: SampleRequest, before: number, after: number): void {
    if (this.limit === 0 || sample.finish === null || (this.rule === 'asked' && plan.receipt !== true)) return
    const kept = keptOf(sample, plan, before === after ? before : null)
    const bytes = bytesOf(kept)
    if (bytes > this.limit) return
    // A client may use an id again: the newest sample has it.
    this.#drop(kept.id)
    this.#samples.set(kept.id, { sample: kept, bytes })
    this.#bytes += bytes
    for (const id of this.#samples.keys()) {
      if (this.#bytes <= this.limit) break
      this.#drop(id)
    }
  }

  #drop (id: string): void {
    const found = this.#samples.get(id)
    if (found === undefined) return
    this.#bytes -= found.bytes
    this.#samples.delete(id)
  }
}

function keptOf (
  sample: Sample,
  { sampling, text, grammar, logprobs }: SampleRequest,
  epoch: number | null
): KeptSample {
  return {
    id: sample.rid,
    endedAt: Date.now(),
    promptIds: sample.promptIds,
    outputIds: Int32Array.from(sample.tokens),
    logprobs: logprobs === null ? null : sample.logprobs.columns().logprobs,
    raw: logprobs?.raw ?? false,
    sampling: { ...sampling, seed: sample.seed ?? sampling.seed ?? 0n },
    text,
    grammar: grammar ?? null,
    spans: sample.spans,
    epoch,
    lora: sample.lora ?? null,
    finish: sample.finish!,
    cachedTokens: sample.cachedTokens,
    retractions: sample.retractions,
    isMeasured: false
  }
}

function bytesOf ({ promptIds, outputIds, logprobs, sampling, text, grammar, spans }: KeptSample): number {
  const texts = [...text.stop, JSON.stringify(grammar)].reduce((sum, { length }) => sum + 2 * length, 0)
  const lists = sampling.stopTokenIds.length + (sampling.allowedTokenIds?.length ?? 0) +
    (sampling.badWords ?? []).reduce((sum, { length }) => sum + length, 0)
  return SAMPLE_BYTES + promptIds.byteLength + outputIds.byteLength + (logprobs?.byteLength ?? 0) + texts +
    8 * lists + 64 * (sampling.logitBias.length + spans.length)
}
