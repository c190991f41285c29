import type { GroupHost } from '../contract/group-host.ts'
import type { StoreClient } from '../rendezvous/client.ts'
import type { Deadline } from '../rendezvous/deadline.ts'
import type { GroupSpec } from './group-spec.ts'
import type { GroupLink } from './link.ts'

/** Totals of all groups since the start. */
export interface GroupCounts {
  joined: number
  failed: number
  bytesReceived: number
  bytesDropped: number
}

/** A connection to the rendezvous; `close` also ends the store if this process runs it. */
export interface GroupStore {
  client: StoreClient
  close: () => void
}

export interface WeightGroupOptions {
  spec: GroupSpec
  host: GroupHost
  counts: GroupCounts
  /** The limit of each phase. */
  timeoutMs: number
  /** Nothing is received straight into the weights. */
  staged: boolean
  /** Connects to the rendezvous, or hosts it, and counts our ranks in it. */
  openStore: (deadline: Deadline) => Promise<GroupStore>
  /**
   * Makes the link of a backend that can be checked before the store is contacted; else `late` makes it, with the
   * store.
   */
  early: () => GroupLink | undefined
  late: (store: StoreClient) => Promise<GroupLink>
}
