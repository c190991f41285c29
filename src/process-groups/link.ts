import type { WriteJob } from '../native/write-job.ts'
import type { GroupHandle } from '../native/groups.ts'
import type { StoreClient } from '../rendezvous/client.ts'
import type { Deadline } from '../rendezvous/deadline.ts'

/** How the ranks of one process group find each other: the part that is the backend's own. */
export interface GroupLink {
  readonly handle: GroupHandle
  /** Connecting, receiving, staging and ending want the gate shut. */
  readonly needsGate: boolean
  /** All ranks connect as soon as the group is made; else with the first broadcast. */
  readonly isEager: boolean
  /** Most bytes to receive at once: larger pieces hide less of the scatter, smaller ones cost more calls. */
  readonly pieceBytes: number
  /** Resolves once bytes can flow, but for `connect`. */
  meet: (store: StoreClient, deadline: Deadline) => Promise<void>
  /** Whether pieces are received by `groupBegin` and `groupArrive` of the addon, or each by `groupReceive`. */
  readonly isAhead: boolean
  /** `groupPlaces` of the addon, where this backend can receive into the weights. */
  places?: (parts: Float64Array, job: WriteJob) => Float64Array
  /** Gate shut where that is needed. Without effect when it is connected. */
  connect: (timeoutMs: number) => Promise<void>
}

/** What the groups of a name left in a store: a trainer that uses its store again has it there still. */
export interface StaleKeys {
  id?: Uint8Array
  addresses?: readonly Uint8Array[]
}
