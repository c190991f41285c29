import { Values } from './distribution.ts'

/** The measurements of a load, in milliseconds. */
export class Measurements {
  /** From the request's start to the first tokens of each sample. */
  readonly firstToken = new Values()
  /** One value for each token after the first event: its event's gap divided by the event's tokens. */
  readonly interToken = new Values()
  /** One value for each event after the first: the time in which a reader of the stream saw nothing. */
  readonly gap = new Values()
  /** For each sample of two tokens or more: first to last token, divided by the tokens after the first event. */
  readonly perToken = new Values()
  /** From the request's start to the end of its reply. */
  readonly request = new Values()
  /** From the time that a request was due to the time that it was sent. */
  readonly late = new Values()
}

/** One sample of a request: when its tokens came. */
export class SampleTimeline {
  readonly #into: Measurements
  readonly #start: number
  #first = 0
  #last = 0
  #atFirst = 0
  #tokens = 0

  constructor (into: Measurements, start: number) {
    this.#into = into
    this.#start = start
  }

  get tokens (): number {
    return this.#tokens
  }

  /** Tokens that one event carried. */
  add (tokens: number, now: number): void {
    if (tokens <= 0) return
    if (this.#tokens === 0) {
      this.#into.firstToken.add(now - this.#start)
      this.#first = now
      this.#atFirst = tokens
    } else {
      this.#into.gap.add(now - this.#last)
      this.#into.interToken.add((now - this.#last) / tokens, tokens)
    }
    this.#last = now
    this.#tokens += tokens
  }

  end (): void {
    const after = this.#tokens - this.#atFirst
    if (after > 0) this.#into.perToken.add((this.#last - this.#first) / after)
  }
}
