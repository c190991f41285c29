// The part of the addon that joins process groups of torch trainers; see src/native/addon.ts.

/** A process group that ranks of this process are in; its number is the addon's. */
export type GroupHandle = number

/** A broadcast into a staging slot: where in the slot it goes, and how many bytes. Float64Array of these, one after another. */
export const PART = { offset: 0, bytes: 1 } as const
/** Length of such a row. */
export const PART_FIELDS = 2

/** Bytes that a group has received, as the source of a write: the slot of each rank on a card, one for all in host memory. */
export interface StagedSource {
  group: GroupHandle
  slot: 0 | 1
}

/**
 * `code` of what these functions throw or reject with. GROUP_TIMEOUT: a deadline has passed. GROUP_BROKEN: a peer ended, closed its
 * connection or sent what it must not. GROUP_REFUSED: the group is impossible; reported before anything is joined
 * where that can be known. GROUP_SHARED_GPU and GROUP_NCCL_VERSION: refused because two ranks of an NCCL group share a GPU, or have versions
 * that do not work together. Messages name phase, peer, rank and elapsed time. After the first two the group is of no use: `endGroup`.
 */
export type GroupErrorCode =
  | 'GROUP_TIMEOUT'
  | 'GROUP_BROKEN'
  | 'GROUP_REFUSED'
  | 'GROUP_SHARED_GPU'
  | 'GROUP_NCCL_VERSION'

export interface NcclGroupOptions {
  /** Ranks of the group, of all processes. */
  size: number
  /** The first of this process's. */
  firstRank: number
  /** The file of NCCL. */
  library?: string
  /** The only tensor-parallel rank of the core that takes part; default: all do. */
  coreRank?: number
  /** A sum of one float32 as soon as all have joined, as part of ncclConnect: what vLLM's PyNcclCommunicator does, and torch's barrier. */
  warmUp?: boolean
  /** UUIDs of other ranks' cards, with or without `GPU-`, as far as they are known: one of ours among them is GROUP_REFUSED. */
  peerGpus?: string[]
}

export interface NativeGroups {
  /**
   * Main thread. gloo: listens for the other ranks on `host` (an address of this machine) for each of `ranks`, which are this process's,
   * in a group of `size`. `addresses`: of each of them what the others must be told (the value of its key in the store).
   */
  glooGroup: (
    options: { size: number, ranks: number[], host: string }
  ) => { group: GroupHandle, addresses: Uint8Array[] }
  /** Main thread. Connects with the other ranks; `peers` has the value of every rank's key, [size]. Runs on a thread of the group. */
  glooConnect: (group: GroupHandle, peers: Uint8Array[], deadlineMs: number) => Promise<void>
  /**
   * Main thread. NCCL: ranks `firstRank`, `firstRank` + 1, ... of a group of `size` are the ranks of the core, each on its own card. Opens
   * the library (`library`, else $REFIT_NCCL, else where it is found); touches no card yet. With `coreRank`: that rank of the core alone,
   * as rank `firstRank`; such a group's slots are no source of a write. Throws GROUP_REFUSED where it cannot be. The core lives as long as
   * the group, closed or not.
   */
  ncclGroup: (core: number, options: NcclGroupOptions) => GroupHandle
  /** Any thread. `2.28.9, /usr/lib/libnccl.so.2`: the version that the group's other ranks must have too. */
  ncclLibrary: (group: GroupHandle) => string
  /** Any thread. 128 bytes for the group to be in which a rank of this process is the first. */
  ncclUniqueId: (library?: string) => Uint8Array
  /** Main thread, gate shut: it allocates. Makes the communicator with all the others. */
  ncclConnect: (group: GroupHandle, uniqueId: Uint8Array, deadlineMs: number) => Promise<void>
  /** Main thread, gate shut where the group is NCCL's. The first `slots` (1 or 2) have room for `bytes` each from now on; 0 bytes give the memory back. */
  stageGroup: (group: GroupHandle, bytes: number, slots: number) => Promise<void>
  /**
   * Main thread, gate shut where the group is NCCL's. Takes part in one broadcast for each of `parts` (PART_FIELDS), in order, from rank
   * `root`, into the slot. The other slot may be read by `write` meanwhile. One receive, send or barrier of a group at a time; but see groupBegin.
   */
  groupReceive: (
    group: GroupHandle,
    slot: 0 | 1,
    parts: Float64Array,
    root: number,
    deadlineMs: number
  ) => Promise<void>
  /**
   * Main thread, gate shut. NCCL alone. groupReceive in two: resolves when the broadcasts are on the cards' streams, so that those of a second call
   * follow the first one's there without a gap; a third one needs `groupArrive` before it.
   */
  groupBegin: (group: GroupHandle, slot: 0 | 1, parts: Float64Array, root: number, deadlineMs: number) => Promise<void>
  /** Main thread, gate shut. The broadcasts of the first `groupBegin` that was not waited for yet have come. */
  groupArrive: (group: GroupHandle, deadlineMs: number) => Promise<void>
  /**
   * Main thread. NCCL alone. Of a write (`tensors` and `rects` of a WriteJob with one source, of which `parts` are stretches): for each part the
   * offset, in bytes from where a rank's weights begin, at which all of its bytes lie there one behind the other and as they are, on every
   * rank; -1 where they do not, and for all parts of a group with `coreRank`. Throws for a write that cannot be, and while the memory of
   * the weights is released.
   */
  groupPlaces: (group: GroupHandle, parts: Float64Array, tensors: Float64Array, rects: Float64Array) => Float64Array
  /**
   * Main thread, gate shut. NCCL alone. As groupReceive, but into the weights themselves: `parts` have the offsets of groupPlaces. No write
   * of these weights may be under way. After a failure any byte of the parts may be torn.
   */
  groupReceiveInPlace: (group: GroupHandle, parts: Float64Array, root: number, deadlineMs: number) => Promise<void>
  /**
   * Main thread. Bytes of a slot as the first of this process's ranks has them (at most 1 GiB): what a trainer sends ahead to say what
   * comes next. Not while they are received.
   */
  groupRead: (group: GroupHandle, slot: 0 | 1, offset: number, bytes: number, deadlineMs: number) => Promise<Uint8Array>
  /** Main thread, gate shut. The broadcasts' other side: `bytes` of host memory, from this process's first rank. NCCL: through slot 0, which must have room. */
  groupSend: (group: GroupHandle, bytes: Uint8Array, deadlineMs: number) => Promise<void>
  /**
   * Main thread, gate shut (not needed to send from host memory). Broadcasts all parameters of the core's tensor-parallel rank `rank`, in
   * their order, from rank `root` of the group (which sends where it is this process's) straight into place: between cores of one layout,
   * which the caller has compared. A group of NCCL was made with `coreRank: rank`: one for each tensor-parallel rank, each with one rank of
   * every engine; they may all run at once. After a failure any parameter of that rank may be torn.
   */
  groupParams: (group: GroupHandle, core: number, rank: number, root: number, deadlineMs: number) => Promise<void>
  /** Main thread, gate shut where the group is NCCL's. torch's `barrier` of the backend: all ranks have come. */
  groupBarrier: (group: GroupHandle, deadlineMs: number) => Promise<void>
  /** Main thread; ends what is under way at once, which rejects with GROUP_BROKEN. Any state. */
  groupAbort: (group: GroupHandle, reason: string) => void
  /** Main thread, gate shut where the group is NCCL's. Leaves in order (`abort`: at once), frees all of it; the handle is unknown after it. */
  endGroup: (group: GroupHandle, abort: boolean) => Promise<void>
}
