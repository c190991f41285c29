import type { HeldWeights } from '../engine/held-weights.ts'
import type { EngineInfo } from '../contract/rollout-engine.ts'
import type { OnRunning, SwapMode } from '../contract/weight-update.ts'
import { RefitError } from '../errors.ts'
import { resolveMaster } from '../rendezvous/resolve-master.ts'
import { Deadline } from '../rendezvous/deadline.ts'
import type { PeerLoadResult } from './load-from-peer.ts'
import type { StoreRules } from './remote-stores.ts'
import { chooseSet } from '../weights/choose-set.ts'

export interface PeerLoadRequest {
  /** URL of the engine that has the weights: http or https. */
  url: string
  key?: string | undefined
  timeoutMs: number
  abort: boolean
  swap: SwapMode
  onRunning: OnRunning
  /** Aborts the load. */
  signal: AbortSignal
}

/** The names of the fields of /update_weights_from_peer. */
const FIELDS = { url: 'url', key: 'api_key' }

/** Loads weights from another engine into this one, which serves. One load at a time. */
export class PeerLoads {
  readonly #own: HeldWeights & { info: EngineInfo }
  readonly #rules: StoreRules
  readonly #closing = new AbortController()
  #from: string | null = null

  constructor (held: HeldWeights, info: EngineInfo, rules: StoreRules) {
    this.#own = { ...held, info }
    this.#rules = rules
  }

  /** The engine that this one is loading from, or null. */
  get from (): string | null {
    return this.#from
  }

  /**
   * Throws the errors of loadFromPeer, MASTER_REFUSED for an address that is not allowed, and CONFLICT during another
   * load or an update of many requests, and for `demand` without a second set of weights.
   */
  async load ({ url, key, timeoutMs, abort, swap, onRunning, signal }: PeerLoadRequest): Promise<PeerLoadResult> {
    if (this.#from !== null) {
      throw new RefitError('CONFLICT', `this engine is already loading weights from ${this.#from}`)
    }
    this.#from = url
    try {
      const { store } = this.#own
      chooseSet(store.shadow, { swap, onRunning, abortAllRequests: abort })
      await store.transactions.requireNone()
      const both = AbortSignal.any([signal, this.#closing.signal])
      // It has an HTTP client, which takes long to import.
      const { loadFromPeer } = await import('./load-from-peer.ts')
      return await loadFromPeer(this.#own, {
        url: await this.#allowed(url, timeoutMs),
        key,
        timeoutMs,
        ncclPath: this.#rules.ncclPath
      }, {
        signal: both,
        abort,
        swap,
        onRunning,
        still: async run => await store.runBetweenSteps(run, timeoutMs),
        names: FIELDS
      })
    } finally {
      this.#from = null
    }
  }

  close (): void {
    this.#closing.abort(new RefitError('ENGINE_CLOSED', 'the engine is shutting down'))
  }

  /**
   * A caller who may name an address can make this machine open connections, so the rules for trainers' stores apply.
   * For http the URL keeps the address that was resolved and checked.
   */
  async #allowed (url: string, timeoutMs: number): Promise<string> {
    // The constructor of Peer reports an invalid URL.
    if (!URL.canParse(url)) return url
    const parsed = new URL(url)
    const { protocol, hostname, port } = parsed
    if (protocol !== 'http:' && protocol !== 'https:') return url
    const { host } = await resolveMaster(
      { host: hostname, port: port === '' ? (protocol === 'http:' ? 80 : 443) : Number(port) },
      this.#rules.policy,
      new Deadline({}, timeoutMs)
    )
      .catch((error: unknown) => {
        if (!(error instanceof RefitError)) throw error
        throw new RefitError(error.code, error.message.replaceAll('master_address', 'url'), {
          param: 'url',
          cause: error
        })
      })
    if (protocol === 'http:') parsed.hostname = host.includes(':') ? `[${host}]` : host
    return parsed.href
  }
}
