import type { HeldWeights } from '../engine/held-weights.ts'
import type { EngineInfo } from '../contract/rollout-engine.ts'
import { RefitError } from '../errors.ts'
import { resolveMaster } from '../rendezvous/resolve-master.ts'
import { Deadline } from '../rendezvous/deadline.ts'
import { loadFromPeer } from './load-from-peer.ts'
import type { PeerLoadResult } from './load-from-peer.ts'
import type { StoreRules } from './remote-stores.ts'

export interface PeerLoadRequest {
  /** Of the engine that has the weights: http or https. */
  url: string
  key?: string | undefined
  timeoutMs: number
  abort: boolean
  /** Gives it up. */
  signal: AbortSignal
}

const WORDS = { url: 'url', key: 'api_key' }

/** Fills this engine, which serves, from another one. One at a time. */
export class PeerLoads {
  readonly #own: HeldWeights & { info: EngineInfo }
  readonly #rules: StoreRules
  readonly #closing = new AbortController()
  #from: string | null = null

  constructor (held: HeldWeights, info: EngineInfo, rules: StoreRules) {
    this.#own = { ...held, info }
    this.#rules = rules
  }

  /** The engine that this one is being filled from. */
  get from (): string | null {
    return this.#from
  }

  /** As loadFromPeer. Throws MASTER_REFUSED for an address that this engine's owner does not allow, and CONFLICT while another fill or an update of many requests is under way. */
  async load ({ url, key, timeoutMs, abort, signal }: PeerLoadRequest): Promise<PeerLoadResult> {
    if (this.#from !== null) throw new RefitError('CONFLICT', `this engine is being filled from ${this.#from} already`)
    this.#from = url
    try {
      const { store } = this.#own
      await store.transactions.requireNone()
      const both = AbortSignal.any([signal, this.#closing.signal])
      return await loadFromPeer(this.#own, {
        url: await this.#allowed(url, timeoutMs),
        key,
        timeoutMs,
        ncclPath: this.#rules.ncclPath
      }, {
        signal: both,
        abort,
        still: async run => await store.runBetweenSteps(run, timeoutMs),
        words: WORDS
      })
    } finally {
      this.#from = null
    }
  }

  close (): void {
    this.#closing.abort(new RefitError('ENGINE_CLOSED', 'the engine is shutting down'))
  }

  /** Whoever may name an address makes this machine open connections: the rules are those of trainers' stores. Of http the address that was looked up stays the one that is called. */
  async #allowed (url: string, timeoutMs: number): Promise<string> {
    // What is no URL is told by who calls it.
    if (!URL.canParse(url)) return url
    const parsed = new URL(url)
    const { protocol, hostname, port } = parsed
    if (protocol !== 'http:' && protocol !== 'https:') return url
    const { host } = await resolveMaster(
      { host: hostname, port: port === '' ? (protocol === 'http:' ? 80 : 443) : Number(port) },
      this
        .#rules
        .policy,
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
