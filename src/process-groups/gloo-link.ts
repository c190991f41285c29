import type { NativeGroups } from '../native/groups.ts'
import type { StoreClient } from '../rendezvous/client.ts'
import { exchangeGlooAddresses } from '../rendezvous/gloo-addresses.ts'
import type { Deadline } from '../rendezvous/deadline.ts'
import type { GroupLink, StaleKeys } from './link.ts'

const PIECE_BYTES = 64 << 20
/** How long ranks of a group with another name get to connect with ours. */
const RELEASE_MS = 5000

export interface GlooLinkOptions {
  name: string
  size: number
  /** The ranks of this process. */
  ranks: number[]
  /** An address of this machine that the other ranks can reach. */
  host: string
  stale: StaleKeys
}

/** gloo: every rank writes its address into the store and connects with all others once they have written theirs. */
export class GlooLink implements GroupLink {
  readonly handle: number
  readonly needsGate = false
  readonly isEager = true
  readonly isAhead = false
  readonly pieceBytes = PIECE_BYTES
  readonly #native: NativeGroups
  readonly #options: GlooLinkOptions
  readonly #addresses: Uint8Array[]

  /** Listens. */
  constructor (native: NativeGroups, options: GlooLinkOptions) {
    const { size, ranks, host } = options
    const { group, addresses } = native.glooGroup({ size, ranks, host })
    this.#native = native
    this.#options = options
    this.handle = group
    this.#addresses = addresses
  }

  async meet (store: StoreClient, deadline: Deadline): Promise<void> {
    const { name, size, ranks, stale } = this.#options
    const peers = await exchangeGlooAddresses(
      store,
      {
        group: name,
        size,
        ranks,
        addresses: this.#addresses,
        release: async peers => {
          await this.#native.glooConnect(this.handle, peers, Math.min(RELEASE_MS, Math.max(1, deadline.timeoutMs)))
        },
        ...stale.addresses === undefined ? {} : { stale: stale.addresses }
      },
      deadline
    )
    stale.addresses = peers
    await this.#native.glooConnect(this.handle, peers, Math.max(1, deadline.timeoutMs))
  }

  async connect (): Promise<void> {}

  get isConnected (): boolean {
    return true
  }
}
