import type { ErrorCode } from '../../errors.ts'
import type { TensorBody } from '../../wire/torch/body.ts'
import type { Offer } from '../../wire/torch/offer.ts'
import type { PlainValue } from '../../wire/torch/plain.ts'
import type { AnnouncedColumns } from './announced-columns.ts'
import type { PackedSegments } from './cuda-segments.ts'
import type { HandleReferences } from './handle-references.ts'
import type { ReleasedCounts } from './request-handles.ts'
import type { VisibleGpu } from './visible-gpus.ts'

// Messages between the main thread and the handle thread (handle-reply.ts packs the replies). Requests are answered in
// the order of their arrival.

/** `visible`: the GPUs that the process sees; null for an engine that does not read GPU memory. */
export interface HandleThreadData {
  visible: readonly VisibleGpu[] | null
  /** Compile the decoder before bodies need it. */
  warmUp: boolean
}

/** The entries of one request, as received or decoded to pickles. */
export interface SentEntries {
  entries: ReadonlyArray<string | Uint8Array>
  loadFormat: string | null
  ranks: number
  gpus: readonly string[]
  /** The references stay the sender's: another engine gives them back. */
  borrowed?: boolean | undefined
  /** The tensors of an adapter; otherwise such tensors are refused. */
  isAdapter?: boolean | undefined
}

export type ToHandleThread =
  /** Decode and open weights. The reply is `announced`, or `refused` after everything has been released. */
  | { type: 'announce', id: number } & SentEntries
  /**
   * The same for tensors of any dtype that a loader makes weights of. The reply is `opened` or `refused`, as for the
   * next three.
   */
  | { type: 'open', id: number } & SentEntries
  /** The same for a pickle of plain data that a tensor holds. */
  | {
    type: 'unpickle'
    id: number
    bytes: Uint8Array
    classes: readonly string[]
    ranks: number
    gpus: readonly string[]
    borrowed?: boolean | undefined
  }
  /** The same for the handle of one tensor, sent on its own (src/wire/trainers/handle.ts). */
  | { type: 'handle', id: number, name: string, bytes: Uint8Array, gpu: string | null }
  /** The same for handles by GPU, with names, dtypes and shapes beside them (src/wire/torch/offer.ts). */
  | { type: 'offer', id: number, entry: string, offer: Offer, ranks: number, gpus: readonly string[] }
  /** Give back the handles that the request `of` opened. The reply is `released`. */
  | { type: 'release', id: number, of: number }
  /** Check whether the senders of the memory that `of` opened still exist. The reply is `looked`. */
  | { type: 'look', id: number, of: number }
  /**
   * Give back the references of a body that was refused before it was read. With `gpus`: if a tensor is offered on
   * several GPUs, only its handles for these. The reply is `released`.
   */
  | { type: 'discard', id: number, entries: ReadonlyArray<string | Uint8Array>, gpus?: readonly string[] }
  /**
   * Release the references that a thread had opened before it ended; its files are closed already. The reply is
   * `released`.
   */
  | { type: 'drop', id: number, references: readonly HandleReferences[] }
  | { type: 'end' }

export interface HeldSources {
  /** All references to be released. */
  references: HandleReferences[]
  /** Descriptors of shared-memory files. */
  fds: number[]
  segments: PackedSegments
  /** Descriptors that were taken out of senders. The main thread closes them after the release. */
  taken: number[]
}

export interface OpenedTensors extends HeldSources {
  body: TensorBody
  /** For each storage of the body the index of its source: `fds` first, then the segments; -1 for none. */
  sourceOf: Int32Array<ArrayBuffer>
  /** For `unpickle`: the data, with marks for tensors. */
  value: PlainValue
}

export type FromHandleThread =
  | { type: 'announced', id: number, tensors: AnnouncedColumns } & HeldSources
  | { type: 'opened', id: number } & OpenedTensors
  | {
    type: 'refused'
    id: number
    code: ErrorCode
    message: string
    param: string | undefined
    released: ReleasedCounts
    taken: number[]
  }
  | { type: 'released', id: number, released: ReleasedCounts }
  /** `gone`: shared memory of a sender that has ended. */
  | { type: 'looked', id: number, gone: string | null }
