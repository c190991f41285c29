// The part of the addon that joins process groups of torch trainers; see src/native/addon.ts.

/** A process group that has ranks in this process. The number is the addon's. */
export type GroupHandle = number

/**
 * One broadcast into a staging slot: its offset in the slot and its bytes. A Float64Array holds such rows one after
 * another.
 */
export const PART = { offset: 0, bytes: 1 } as const
/** Length of such a row. */
export const PART_FIELDS = 2

/**
 * A message of torch's send: the rank of this process that it goes to, the rank that sends it, its tag (gloo), `into`
 * (0 for the slot, or with NCCL 1 + the index of a parameter of the rank), its offset there and its bytes. A
 * Float64Array holds such rows one after another.
 */
export const MESSAGE = { mine: 0, other: 1, tag: 2, into: 3, offset: 4, bytes: 5 } as const
/** Length of such a row. */
export const MESSAGE_FIELDS = 6

/**
 * Bytes that a group has received, as the source of a write: on GPUs the slot of each rank, in host memory one slot for
 * all.
 */
export interface StagedSource {
  group: GroupHandle
  slot: 0 | 1
}

/**
 * `code` of errors of these functions. GROUP_TIMEOUT: a deadline has passed. GROUP_BROKEN: a peer ended, closed its
 * connection or sent invalid data. GROUP_REFUSED: the group is impossible; reported before anything is joined if that
 * can be known. GROUP_SHARED_GPU and GROUP_NCCL_VERSION: refused because two ranks of an NCCL group share a GPU, or
 * have versions that do not work together. Messages name phase, peer, rank and elapsed time. After the first two the
 * group is unusable: call `endGroup`.
 */
export type GroupErrorCode =
  | 'GROUP_TIMEOUT'
  | 'GROUP_BROKEN'
  | 'GROUP_REFUSED'
  | 'GROUP_SHARED_GPU'
  | 'GROUP_NCCL_VERSION'

export interface NcclGroupOptions {
  /** Number of ranks in the group, over all processes. */
  size: number
  /** The first rank of this process. */
  firstRank: number
  /** Path of the NCCL library. */
  library?: string
  /** The only tensor-parallel rank of the core that takes part; default: all ranks. */
  coreRank?: number
  /**
   * Adds up one float32 over all ranks as soon as all have joined, as part of ncclConnect. vLLM's PyNcclCommunicator
   * and torch's barrier do this.
   */
  warmUp?: boolean
  /**
   * UUIDs of other ranks' GPUs as far as they are known, with or without `GPU-`. One of this process's among them is
   * refused.
   */
  peerGpus?: string[]
}

export interface NativeGroups {
  /**
   * Main thread. gloo: listens on `host` (an address of this machine) for the other ranks, once for each of `ranks`,
   * this process's ranks in a group of `size`. `addresses` has what the others need to connect to each of them (the
   * value of its key in the store).
   */
  glooGroup: (
    options: { size: number, ranks: number[], host: string }
  ) => { group: GroupHandle, addresses: Uint8Array[] }
  /**
   * Main thread. Connects to the other ranks; `peers` has the value of every rank's key, [size]. Runs on a thread of
   * the group.
   */
  glooConnect: (group: GroupHandle, peers: Uint8Array[], deadlineMs: number) => Promise<void>
  /**
   * Main thread. NCCL: ranks `firstRank`, `firstRank` + 1, ... of a group of `size` are the ranks of the core, each on
   * its own GPU. Opens the library (`library`, else $REFIT_NCCL, else the usual places); uses no GPU yet. With
   * `coreRank` only that rank of the core joins, as rank `firstRank`; such a group's slots cannot be the source of a
   * write. Throws GROUP_REFUSED if the group is impossible. The core lives as long as the group, closed or not.
   */
  ncclGroup: (core: number, options: NcclGroupOptions) => GroupHandle
  /** Any thread. `2.28.9, /usr/lib/libnccl.so.2`: the version that the group's other ranks need too. */
  ncclLibrary: (group: GroupHandle) => string
  /** Any thread. The 128-byte id of a group whose rank 0 is in this process. */
  ncclUniqueId: (library?: string) => Uint8Array
  /** Main thread, gate shut, because it allocates. Makes the communicator with all other ranks. */
  ncclConnect: (group: GroupHandle, uniqueId: Uint8Array, deadlineMs: number) => Promise<void>
  /**
   * Main thread, gate shut for an NCCL group. The first `slots` (1 or 2) get room for `bytes` each; 0 bytes free the
   * memory.
   */
  stageGroup: (group: GroupHandle, bytes: number, slots: number) => Promise<void>
  /**
   * Main thread, gate shut for an NCCL group. Takes part in one broadcast for each of `parts` (PART_FIELDS), in order,
   * from rank `root` into the slot. `write` may read the other slot meanwhile. A group runs one receive, send or
   * barrier at a time; groupBegin is the exception.
   */
  groupReceive: (
    group: GroupHandle,
    slot: 0 | 1,
    parts: Float64Array,
    root: number,
    deadlineMs: number
  ) => Promise<void>
  /**
   * Main thread. gloo only. Receives messages (MESSAGE_FIELDS) of torch's `send` and `isend` into the slot, in any
   * order. One of a pair of ranks and a tag at a time.
   */
  groupReceiveMessages: (
    group: GroupHandle,
    slot: 0 | 1,
    messages: Float64Array,
    deadlineMs: number
  ) => Promise<void>
  /**
   * Main thread, gate shut. NCCL only. The first half of groupReceive: resolves when the broadcasts are queued on the
   * GPUs' streams. Those of a second call follow the first there without a gap; a third call needs `groupArrive` before
   * it.
   */
  groupBegin: (group: GroupHandle, slot: 0 | 1, parts: Float64Array, root: number, deadlineMs: number) => Promise<void>
  /**
   * Main thread, gate shut. Waits until the broadcasts of the oldest `groupBegin` that has not been waited for have
   * arrived.
   */
  groupArrive: (group: GroupHandle, deadlineMs: number) => Promise<void>
  /**
   * Main thread, gate shut. NCCL only. As groupBegin, for messages (MESSAGE_FIELDS) of torch's `batch_isend_irecv`.
   * All of one call are received together, and those of a pair of ranks in this order. Messages to parameters have the
   * rules of groupReceiveInPlace, but each rank has places of its own.
   */
  groupBeginMessages: (
    group: GroupHandle,
    slot: 0 | 1,
    messages: Float64Array,
    deadlineMs: number,
    set?: number
  ) => Promise<void>
  /**
   * Main thread. NCCL only. Takes the `tensors` and `rects` of a WriteJob with one source; `parts` are stretches of
   * that source. Returns for each part the offset from the start of a rank's weights, in bytes, if all bytes of the
   * part lie there contiguously and unchanged on every rank. Returns -1 for other parts, and for all parts of a group
   * with `coreRank`. Throws for an invalid write, and while the memory of the weights (`set`, default 0) is released.
   */
  groupPlaces: (
    group: GroupHandle,
    parts: Float64Array,
    tensors: Float64Array,
    rects: Float64Array,
    set?: number
  ) => Float64Array
  /**
   * Main thread. NCCL only. As groupReceive, but straight into a set of weights (default 0): `parts` have the offsets
   * that groupPlaces returned. No step and no write of these weights may be under way. After a failure any byte of the
   * parts may be torn.
   */
  groupReceiveInPlace: (
    group: GroupHandle,
    parts: Float64Array,
    root: number,
    deadlineMs: number,
    set?: number
  ) => Promise<void>
  /**
   * Main thread. Bytes of a slot as this process's first rank has them (at most 1 GiB): for metadata that a trainer
   * sends ahead of its tensors. Not while bytes are being received.
   */
  groupRead: (group: GroupHandle, slot: 0 | 1, offset: number, bytes: number, deadlineMs: number) => Promise<Uint8Array>
  /**
   * Main thread, gate shut. The sending side of a broadcast: `bytes` of host memory, from this process's first rank.
   * NCCL sends through slot 0, which needs the room.
   */
  groupSend: (group: GroupHandle, bytes: Uint8Array, deadlineMs: number) => Promise<void>
  /**
   * Main thread, gate shut (not needed to send from host memory). Broadcasts all parameters of the core's
   * tensor-parallel rank `rank`, in their order, from rank `root` of the group straight into place. If `root` is in
   * this process, it sends. The caller has compared the layouts of the cores. An NCCL group was made with `coreRank:
   * rank`: there is one group for each tensor-parallel rank, with one rank of every engine, and all of them may run at
   * once. After a failure any parameter of that rank may be torn. `set`: of weights, default 0.
   */
  groupParams: (
    group: GroupHandle,
    core: number,
    rank: number,
    root: number,
    deadlineMs: number,
    set?: number
  ) => Promise<void>
  /**
   * Main thread, gate shut for an NCCL group. torch's `barrier` of the backend: waits until all ranks have called it.
   */
  groupBarrier: (group: GroupHandle, deadlineMs: number) => Promise<void>
  /** Main thread, in any state. Ends running calls at once; they reject with GROUP_BROKEN. */
  groupAbort: (group: GroupHandle, reason: string) => void
  /**
   * Main thread, gate shut for an NCCL group. Leaves in order (`abort`: at once) and frees everything; afterwards the
   * handle is unknown.
   */
  endGroup: (group: GroupHandle, abort: boolean) => Promise<void>
}
