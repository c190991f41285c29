import { errorMessage, RefitError } from '../../errors.ts'
import type { NativeAddon } from '../../native/addon.ts'
import type { CudaSegment } from '../../native/write-job.ts'
import type { ExpandableHandle, IpcHandle } from '../../wire/torch/ipc-handle.ts'
import type { CudaStorage } from '../../wire/torch/tensor.ts'
import type { HandleSegment } from '../../wire/torch/handle-lists.ts'
import type { VisibleGpus } from './visible-gpus.ts'

/** Segments to be posted to the main thread: 64 bytes of each handle, and the events of all of them, concatenated. */
export interface PackedSegments {
  uuids: string[]
  /** Zeros for segments that consist of blocks. */
  handles: Uint8Array<ArrayBuffer>
  /** By index. */
  blocks: Map<number, { blockBytes: number, fds: number[], fabric: string }>
  events: Uint8Array<ArrayBuffer>
  /** The end of each segment's events. */
  eventEnds: Int32Array<ArrayBuffer>
}

interface Segment {
  uuid: string
  handle: IpcHandle
  events: Set<string>
}

const HANDLE_BYTES = 64
// Descriptors of one process, which holds them while they are mapped.
const MAX_DESCRIPTORS = 4096

/** The segments of one request's storages, without duplicates. Runs on the handle thread. */
export class CudaSegments {
  readonly #addon: Pick<NativeAddon, 'takeDescriptor'>
  readonly #gpus: VisibleGpus
  readonly #list: Segment[] = []
  readonly #byKey = new Map<string, number>()
  readonly #byHandle = new Map<IpcHandle, number>()
  /** Own descriptors by the sender's. Neighbouring storages of an expandable segment have blocks in common. */
  readonly #taken = new Map<string, number>()

  constructor (addon: Pick<NativeAddon, 'takeDescriptor'>, gpus: VisibleGpus) {
    this.#addon = addon
    this.#gpus = gpus
  }

  /**
   * The index of the storage's segment. Throws TENSOR_PAYLOAD for a GPU that is not visible here, and for descriptors
   * that cannot be taken.
   */
  add ({ device, handle, event }: CudaStorage): number {
    let index = this.#byHandle.get(handle)
    if (index === undefined) this.#byHandle.set(handle, index = this.#find(device, handle))
    if (event !== null) this.#list[index]!.events.add(event)
    return index
  }

  /** The same for a whole segment. */
  addSegment ({ device, handle, events }: HandleSegment): number {
    const index = this.#find(device, handle)
    for (const event of events) this.#list[index]!.events.add(event)
    return index
  }

  #find (device: number | string, handle: IpcHandle): number {
    const uuid = this.#gpus.uuidOf(device)
    // Handles that differ only in their padding, or in the version of torch that wrote them, open the same memory.
    const key = `${uuid}/${handle.type}/${handle.key}`
    const known = this.#byKey.get(key)
    if (known !== undefined) return known
    if (handle.type === 'expandable') this.#take(handle)
    const index = this.#list.push({ uuid, handle, events: new Set() }) - 1
    this.#byKey.set(key, index)
    return index
  }

  #take ({ pid, fds }: ExpandableHandle): void {
    for (const fd of fds) {
      const key = `${pid}/${fd}`
      if (this.#taken.has(key)) continue
      if (this.#taken.size >= MAX_DESCRIPTORS) {
        throw new RefitError(
          'TENSOR_PAYLOAD',
          `one request may have ${MAX_DESCRIPTORS} blocks of expandable segments; ` +
            'send several requests, or start the sender without expandable_segments'
        )
      }
      this.#taken.set(key, takeDescriptor(this.#addon, pid, fd))
    }
  }

  get count (): number {
    return this.#list.length
  }

  pack (): PackedSegments {
    const handles = Buffer.alloc(this.#list.length * HANDLE_BYTES)
    const blocks: PackedSegments['blocks'] = new Map()
    const eventEnds = new Int32Array(this.#list.length)
    let text = ''
    for (const [index, { handle, events }] of this.#list.entries()) {
      for (const event of events) text += event
      eventEnds[index] = text.length
      if (handle.type === 'device') handles.write(handle.key, index * HANDLE_BYTES, 'latin1')
      else {blocks.set(index, {
          blockBytes: handle.segmentBytes,
          fds: handle
            .fds
            .map(fd => this.#taken.get(`${handle.pid}/${fd}`)!),
          fabric: handle.fabric.join('')
        })}
    }
    return {
      uuids: this.#list.map(({ uuid }) => uuid),
      handles: new Uint8Array(handles),
      blocks,
      events: new Uint8Array(Buffer.from(text, 'latin1')),
      eventEnds
    }
  }

  /**
   * Descriptors that were taken out of senders. The main thread closes them: Node warns if another thread closes
   * descriptors that it has not opened.
   */
  get taken (): number[] {
    return [...this.#taken.values()]
  }
}

/** The segments in the addon's form. Views: nothing is copied again. */
export function unpackSegments ({ uuids, handles, blocks, events, eventEnds }: PackedSegments): CudaSegment[] {
  return uuids.map((uuid, index) => {
    const block = blocks.get(index)
    return {
      uuid,
      handle: block === undefined
        ? handles.subarray(index * HANDLE_BYTES, (index + 1) * HANDLE_BYTES)
        : { ...block, fabric: new Uint8Array(Buffer.from(block.fabric, 'latin1')) },
      events: events.subarray(index === 0 ? 0 : eventEnds[index - 1]!, eventEnds[index]!)
    }
  })
}

function takeDescriptor (addon: Pick<NativeAddon, 'takeDescriptor'>, pid: number, fd: number): number {
  try {
    return addon.takeDescriptor(pid, fd)
  } catch (error) {
    const why = errorMessage(error)
    throw new RefitError('TENSOR_PAYLOAD', `it lies in an expandable segment: ${why}`, { cause: error })
  }
}
