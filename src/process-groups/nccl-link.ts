import type { WriteJob } from '../native/write-job.ts'
import type { NativeGroups } from '../native/groups.ts'
import type { StoreClient } from '../rendezvous/client.ts'
import { UNIQUE_ID_FORMS } from '../rendezvous/unique-id-forms.ts'
import type { UniqueIdFormName } from '../rendezvous/unique-id-forms.ts'
import { findUniqueId, publishUniqueId } from '../rendezvous/unique-id.ts'
import type { Deadline } from '../rendezvous/deadline.ts'
import type { GroupLink, StaleKeys } from './link.ts'

const PIECE_BYTES = 512 << 20

export interface NcclLinkOptions {
  name: string
  size: number
  /** The first rank of this process. */
  firstRank: number
  /** The only tensor-parallel rank of the core in the group; undefined: all of them. */
  coreRank?: number | undefined
  /** Path of libnccl.so.2; default: the one that the addon finds. */
  library: string | undefined
  stale: StaleKeys
  /** Default torch's. */
  form?: UniqueIdFormName
  /** Rank 0 is in this process, and makes the id. */
  hosts?: boolean
}

/** NCCL: rank 0 publishes the id of the communicator; then all ranks make it together. */
export class NcclLink implements GroupLink {
  readonly handle: number
  readonly needsGate = true
  readonly isEager: boolean
  readonly isAhead = true
  readonly pieceBytes = PIECE_BYTES
  readonly #native: NativeGroups
  readonly #options: NcclLinkOptions
  #id: Uint8Array | undefined
  #connecting: Promise<void> | undefined
  #isConnected = false

  /** Opens the library without using a GPU. */
  constructor (native: NativeGroups, core: number, options: NcclLinkOptions) {
    const { size, firstRank, coreRank, library } = options
    this.#native = native
    this.#options = options
    const { warmUp, atOnce } = UNIQUE_ID_FORMS[options.form ?? 'custom']
    this.isEager = atOnce
    this.handle = native.ncclGroup(core, {
      size,
      firstRank,
      warmUp,
      ...coreRank === undefined ? {} : { coreRank },
      ...library === undefined ? {} : { library }
    })
  }

  async meet (store: StoreClient, deadline: Deadline): Promise<void> {
    const { name, size, stale, form = 'custom', hosts = false, library } = this.#options
    if (hosts) {
      this.#id = this.#native.ncclUniqueId(library)
      return await publishUniqueId(store, name, form, this.#id, deadline)
    }
    const { id } = await findUniqueId(store, {
      group: name,
      size,
      forms: [form],
      ...stale.id === undefined ? {} : { stale: [stale.id] }
    }, deadline)
    stale.id = id
    this.#id = id
  }

  places (parts: Float64Array, { tensors, rects }: WriteJob, set: number): Float64Array {
    return this.#native.groupPlaces(this.handle, parts, tensors, rects, set)
  }

  async connect (timeoutMs: number): Promise<void> {
    this.#connecting ??= this.#native.ncclConnect(this.handle, this.#id!, timeoutMs)
    await this.#connecting
    this.#isConnected = true
  }

  get isConnected (): boolean {
    return this.#isConnected
  }
}
