import type { AdapterInfo } from '../../contract/adapters.ts'
import type { FinishReason, InputLogprobs, KeptSet, StartTimes } from '../../contract/rollout-engine.ts'
import { ScoreList, ScoreTable } from '../../engine/score-table.ts'
import type { TextEvent } from '../../engine/text-generation.ts'

/** Tokens [start, end) of the output come from weights with this label. */
export interface VersionSpan {
  version: string
  start: number
  end: number
}

/** Output of one engine request so far. */
export class Sample {
  readonly rid: string
  readonly promptIds: Int32Array
  text = ''
  readonly tokens: number[] = []
  readonly logprobs = new ScoreList()
  readonly top = new ScoreTable()
  readonly ids = new ScoreTable()
  /** One entry per token, if requested. */
  readonly kept: KeptSet[] = []
  input: InputLogprobs | null = null
  /** See `TokenEvent.scores`. */
  scores: Float32Array | null = null
  /** See `TokenEvent.experts`; set once it has ended. */
  experts: Uint16Array | null = null
  readonly spans: VersionSpan[] = []
  readonly #adapter: AdapterInfo | undefined
  #adapterVersion: number | undefined
  /** The engine's label until the first token reports its own. */
  weightVersion: string
  promptTokens: number
  cachedTokens = 0
  retractions = 0
  seed: bigint | null = null
  finish: FinishReason | null = null
  readonly startedAt = performance.now()
  firstTokenAt: number | null = null
  lastTokenAt = 0
  endedAt: number | null = null
  /** Null until its prefill has ended, and on engines that do not measure it. */
  times: StartTimes | null = null

  /** `adapter`: the version that its name stood for when the request came. */
  constructor (rid: string, promptIds: Int32Array, weightVersion: string, adapter?: AdapterInfo) {
    this.#adapter = adapter
    this.rid = rid
    this.promptIds = promptIds
    this.promptTokens = promptIds.length
    this.weightVersion = weightVersion
  }

  take (event: TextEvent): void {
    const now = performance.now()
    if (event.tokens.length > 0) {
      this.firstTokenAt ??= now
      this.lastTokenAt = now
      this.#extendSpan(event.weightVersion, event.tokens.length)
    }
    // Not push(...list): a first event can contain more logprobs than a call takes arguments.
    for (const token of event.tokens) this.tokens.push(token)
    for (const logprob of event.logprobs) this.logprobs.push(logprob)
    for (const row of event.top) this.top.push(row)
    for (const row of event.ids) this.ids.push(row)
    for (const kept of event.kept ?? []) this.kept.push(kept)
    this.text += event.text
    this.input = event.input ?? this.input
    this.scores = event.scores ?? this.scores
    // An event without a token, such as an abort, may come after an update that produced none of the tokens.
    if (event.tokens.length > 0 || this.tokens.length === 0) this.weightVersion = event.weightVersion
    this.promptTokens = event.promptTokens
    this.#adapterVersion = event.adapterVersion ?? this.#adapterVersion
    this.cachedTokens = event.cachedTokens
    this.retractions = event.retractions
    this.seed = event.seed
    this.times ??= event.times ?? null
    if (event.finish === null) return
    this.experts = event.experts ?? null
    this.finish = event.finish
    this.endedAt = now
  }

  /** The adapter that made the tokens; undefined for the base model. */
  get lora (): { name: string, version: number, digest?: string } | undefined {
    if (this.#adapter === undefined) return undefined
    const { name, version, digest } = this.#adapter
    const used = this.#adapterVersion ?? version
    // The name may have got another version between the check of the request and its start.
    return { name, version: used, ...used === version ? { digest } : {} }
  }

  get seconds (): number {
    return ((this.endedAt ?? performance.now()) - this.startedAt) / 1000
  }

  /** Mean time from one token to the next; null if there are not two. */
  get secondsPerToken (): number | null {
    if (this.firstTokenAt === null || this.tokens.length < 2) return null
    return (this.lastTokenAt - this.firstTokenAt) / 1000 / (this.tokens.length - 1)
  }

  #extendSpan (version: string, count: number): void {
    const start = this.tokens.length
    const last = this.spans.at(-1)
    if (last?.version === version) last.end += count
    else this.spans.push({ version, start, end: start + count })
  }
}
