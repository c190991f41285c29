import type { FinishReason } from '../contract/rollout-engine.ts'

/** How the events of one request become others. */
export interface EventMapping<In, Out> {
  /** Begins the request. Called by the first read. */
  open: () => AsyncIterable<In> | Promise<AsyncIterable<In>>
  /** Null leaves an event out. The first result with a finish is the last. */
  map: (event: In) => Out | null
  /** Called when no event follows, or the reader has stopped: `open` need not wait any longer. */
  stop?: () => void
  /** Called after `stop`, when the source has ended; twice if it was opened after the reader had stopped. */
  close?: () => void
}

/**
 * The events of a request, mapped. Each token of each request passes here, and an async generator would make several
 * times as many promises. For one reader; one that stops early ends the request.
 */
export class MappedEvents<In, Out extends { finish: FinishReason | null }> implements AsyncIterableIterator<Out> {
  readonly #mapping: EventMapping<In, Out>
  #opening: Promise<AsyncIterator<In>> | null = null
  #source: AsyncIterator<In> | null = null
  #isEnded = false

  constructor (mapping: EventMapping<In, Out>) {
    this.#mapping = mapping
  }

  [Symbol.asyncIterator] (): this {
    return this
  }

  async next (): Promise<IteratorResult<Out>> {
    if (this.#isEnded) return { done: true, value: undefined }
    try {
      const source = this.#source ?? await (this.#opening ??= this.#open())
      // The reader may stop while the request is opened.
      while (!this.#isEnded) {
        const { done, value } = await source.next()
        if (done === true) break
        const event = this.#mapping.map(value)
        if (event === null) continue
        if (event.finish !== null) await this.return()
        return { done: false, value: event }
      }
    } catch (error) {
      await this.return()
      throw error
    }
    return await this.return()
  }

  async return (): Promise<IteratorResult<Out>> {
    this.#isEnded = true
    const source = this.#source
    this.#source = null
    this.#mapping.stop?.()
    try {
      await source?.return?.()
    } finally {
      this.#mapping.close?.()
    }
    return { done: true, value: undefined }
  }

  async #open (): Promise<AsyncIterator<In>> {
    this.#source = (await this.#mapping.open())[Symbol.asyncIterator]()
    return this.#source
  }
}
