import type { WriteJob } from '../native/write-job.ts'
import type { GroupHandle } from '../native/groups.ts'
import type { StoreClient } from '../rendezvous/client.ts'
import type { Deadline } from '../rendezvous/deadline.ts'

/** The part of a process group that depends on the backend: how its ranks find each other and connect. */
export interface GroupLink {
  readonly handle: GroupHandle
  /** Connecting, receiving, staging and ending require the gate to be shut. */
  readonly needsGate: boolean
  /** All ranks connect as soon as the group is made, not with the first broadcast. */
  readonly isEager: boolean
  /** The most bytes to receive at once. Larger pieces overlap less with the scatter; smaller ones cost more calls. */
  readonly pieceBytes: number
  /** Exchanges addresses or ids; afterwards only `connect` is missing. */
  meet: (store: StoreClient, deadline: Deadline) => Promise<void>
  /** Pieces are received by the addon's `groupBegin` and `groupArrive`; if false, by `groupReceive`. */
  readonly isAhead: boolean
  /** `groupPlaces` of the addon; only for a backend that can receive into the weights. */
  places?: (parts: Float64Array, job: WriteJob, set: number) => Float64Array
  /** The gate must be shut if `needsGate`. Does nothing if it is connected. */
  connect: (timeoutMs: number) => Promise<void>
  readonly isConnected: boolean
}

/** Values that earlier groups of a name left in a store. A trainer that reuses its store still has them there. */
export interface StaleKeys {
  id?: Uint8Array
  addresses?: readonly Uint8Array[]
}
