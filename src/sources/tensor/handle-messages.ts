import type { ErrorCode } from '../../errors.ts'
import type { TensorBody } from '../../wire/torch/body.ts'
import type { Offer } from '../../wire/torch/offer.ts'
import type { PlainValue } from '../../wire/torch/plain.ts'
import type { AnnouncedColumns } from './announced-columns.ts'
import type { PackedSegments } from './cuda-segments.ts'
import type { HandleReferences } from './handle-references.ts'
import type { ReleasedCounts } from './request-handles.ts'
import type { VisibleGpu } from './visible-gpus.ts'

// What the main thread and the thread of the shares say to each other (replies between threads are packed, see share-reply.ts). Requests are
// answered in the order in which they came.

/** `visible`: of an engine that reads memory of GPUs, those that the process sees. */
export interface HandleThreadData {
  visible: readonly VisibleGpu[] | null
}

/** Of one request; entries as they came, or decoded to pickles. */
export interface SentEntries {
  entries: ReadonlyArray<string | Uint8Array>
  loadFormat: string | null
  ranks: number
  gpus: readonly string[]
}

export type ToHandleThread =
  /** Decode and open weights. Answered by `announced`, or by `refused` after everything has been given back. */
  | { type: 'announce', id: number } & SentEntries
  /** The same for tensors that are looked at before they are weights, of any dtype. Answered by `opened`, as the next three, or by `refused`. */
  | { type: 'open', id: number } & SentEntries
  /** The same for a pickle of plain data that stood in a tensor. */
  | {
    type: 'unpickle'
    id: number
    bytes: Uint8Array
    classes: readonly string[]
    ranks: number
    gpus: readonly string[]
  }
  /** The same for the handle of one tensor, sent on its own (src/wire/torch/handle.ts). */
  | { type: 'handle', id: number, name: string, bytes: Uint8Array, gpu: string | null }
  /** The same for handles by GPU, with names, dtypes and shapes beside them (src/wire/torch/offer.ts). */
  | { type: 'offer', id: number, entry: string, offer: Offer, ranks: number, gpus: readonly string[] }
  /** Give back what the request `of` opened. Answered by `released`. */
  | { type: 'release', id: number, of: number }
  /** Whether the senders of what `of` opened are still there. Answered by `looked`. */
  | { type: 'look', id: number, of: number }
  /** Give back what a body shares that was refused unread; with `gpus`, of what is offered on several only what is for these. Answered by `released`. */
  | { type: 'discard', id: number, entries: ReadonlyArray<string | Uint8Array>, gpus?: readonly string[] }
  /** Give back what another thread opened, which has ended: the references, not the files. Answered by `released`. */
  | { type: 'drop', id: number, references: readonly HandleReferences[] }
  | { type: 'end' }

export interface HeldSources {
  /** All that is to be given back. */
  references: HandleReferences[]
  /** Of shared-memory files. */
  fds: number[]
  segments: PackedSegments
  /** Descriptors that were taken out of senders, to be closed by the main thread after the release. */
  taken: number[]
}

export interface OpenedTensors extends HeldSources {
  body: TensorBody
  /** For each storage of the body, the source that it lies in: `fds` first, then the segments; -1 for none. */
  sourceOf: Int32Array<ArrayBuffer>
  /** Of `unpickle`: the data, with marks for tensors. */
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
