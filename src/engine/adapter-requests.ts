import { RefitError } from '../errors.ts'
import type { AdapterLease, AdapterStore } from '../adapters/adapter-store.ts'
import type { GenerateRequest, TokenEvent } from '../contract/rollout-engine.ts'
import { MappedEvents } from './mapped-events.ts'
import type { PlacedRequest } from './messages.ts'
import { seedSource } from './seed-source.ts'

const drawSeed = seedSource(null)

const ABORTED = new Error('aborted while it waited for a slot')

/** Requests that use adapters: each takes a version, and its slot, before the scheduler gets it. */
export class AdapterRequests {
  readonly #adapters: AdapterStore
  readonly #generate: (request: PlacedRequest) => AsyncIterable<TokenEvent>
  readonly #version: () => string
  /** By rid, those that wait for a slot. */
  readonly #waiting = new Map<string, AbortController>()

  readonly #limit: number

  /** `generate` passes a request to the scheduler, `version` is the label of the weights, `limit` is of the waiting. */
  constructor (
    adapters: AdapterStore,
    generate: (request: PlacedRequest) => AsyncIterable<TokenEvent>,
    { version, limit }: { version: () => string, limit: number }
  ) {
    this.#adapters = adapters
    this.#generate = generate
    this.#version = version
    this.#limit = limit
  }

  get waiting (): number {
    return this.#waiting.size
  }

  generate (request: GenerateRequest): AsyncIterableIterator<TokenEvent> {
    const control = new AbortController()
    let lease: AdapterLease | undefined
    return new MappedEvents({
      open: async () => {
        lease = await this.#enter(request, control)
        if (lease === undefined) return oneEvent(abortedEvent(request, this.#version()))
        const { adapter, ...rest } = request
        const { slot, version } = lease
        return this.#generate({ ...rest, place: { slot, version } })
      },
      map: event => {
        if (lease !== undefined) event.adapterVersion = lease.version
        return event
      },
      stop: () => {
        control.abort(ABORTED)
      },
      close: () => {
        lease?.release()
      }
    })
  }

  /** Waits for a slot; undefined if the request is aborted meanwhile. */
  async #enter ({ rid, adapter }: GenerateRequest, control: AbortController): Promise<AdapterLease | undefined> {
    if (this.#waiting.has(rid)) {
      throw new RefitError('INVALID_REQUEST', `Duplicate request ID detected: ${rid}; it waits`, { param: 'rid' })
    }
    if (this.#waiting.size >= this.#limit) {
      throw new RefitError(
        'QUEUE_FULL',
        `${this.#waiting.size} requests wait for slots of LoRA adapters, as many as --max-queued-requests allows; ` +
          'try again later'
      )
    }
    this.#waiting.set(rid, control)
    try {
      return await this.#adapters.enter(adapter!, control.signal)
    } catch (error) {
      if (error !== ABORTED) throw error
      return undefined
    } finally {
      this.#waiting.delete(rid)
    }
  }

  /** Ends a request that waits for a slot; false if none has this rid. */
  abort (rid: string): boolean {
    const control = this.#waiting.get(rid)
    control?.abort(ABORTED)
    return control !== undefined
  }

  abortAll (): number {
    const count = this.#waiting.size
    for (const control of this.#waiting.values()) control.abort(ABORTED)
    return count
  }
}

async function* oneEvent (event: TokenEvent): AsyncGenerator<TokenEvent> {
  yield await Promise.resolve(event)
}

function abortedEvent ({ inputIds, sampling }: GenerateRequest, weightVersion: string): TokenEvent {
  return {
    tokens: [],
    logprobs: [],
    top: [],
    ids: [],
    input: null,
    weightVersion,
    promptTokens: inputIds.length,
    cachedTokens: 0,
    completionTokens: 0,
    retractions: 0,
    seed: sampling.seed ?? drawSeed(),
    finish: { type: 'abort', message: 'Abort in waiting queue' }
  }
}
