import type { RefitError } from '../errors.ts'
import type { TokenEvent } from '../contract/rollout-engine.ts'

/** Calls to a stream's owner. */
export interface StreamOwner {
  /** Sends the request; throws if it is refused. */
  begin: (stream: TokenStream) => void
  /** The reader has stopped before the end. */
  leave: (stream: TokenStream) => void
}

/**
 * Events of one request, kept until they are read. Starts with the first read; a reader that stops early aborts it. For
 * one reader.
 */
export class TokenStream implements AsyncIterableIterator<TokenEvent> {
  readonly #owner: StreamOwner
  readonly #events: TokenEvent[] = []
  #waiting: { resolve: (result: IteratorResult<TokenEvent>) => void, reject: (error: RefitError) => void } | null = null
  #state: 'new' | 'live' | 'ended' = 'new'
  #error: RefitError | null = null

  constructor (owner: StreamOwner) {
    this.#owner = owner
  }

  [Symbol.asyncIterator] (): this {
    return this
  }

  async next (): Promise<IteratorResult<TokenEvent>> {
    if (this.#state === 'new') {
      this.#state = 'ended'
      this.#owner.begin(this)
      this.#state = 'live'
    }
    const event = this.#events.shift()
    if (event !== undefined) return { done: false, value: event }
    if (this.#error !== null) {
      const error = this.#error
      this.#error = null
      throw error
    }
    if (this.#state === 'ended') return { done: true, value: undefined }
    if (this.#waiting !== null) throw new Error('a token stream has one reader at a time')
    return await new Promise((resolve, reject) => {
      this.#waiting = { resolve, reject }
    })
  }

  async return (): Promise<IteratorResult<TokenEvent>> {
    const live = this.#state === 'live'
    this.#state = 'ended'
    this.#events.length = 0
    this.#error = null
    if (live) this.#owner.leave(this)
    this.#waiting?.resolve({ done: true, value: undefined })
    this.#waiting = null
    return { done: true, value: undefined }
  }

  push (event: TokenEvent): void {
    if (event.finish !== null) this.#state = 'ended'
    if (this.#waiting === null) {
      this.#events.push(event)
      return
    }
    this.#waiting.resolve({ done: false, value: event })
    this.#waiting = null
  }

  fail (error: RefitError): void {
    this.#state = 'ended'
    if (this.#waiting === null) {
      this.#error = error
      return
    }
    this.#waiting.reject(error)
    this.#waiting = null
  }
}
