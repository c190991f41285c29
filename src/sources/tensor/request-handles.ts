import { closeSync } from 'node:fs'
import { RefitError } from '../../errors.ts'
import type { NativeAddon } from '../../native/addon.ts'
import type { HandleSegment } from '../../wire/torch/handle-lists.ts'
import { SHARED_FILE_HEADER } from '../../wire/torch/tensor.ts'
import type { SharedFileStorage, TensorStorage } from '../../wire/torch/tensor.ts'
import { CudaSegments } from './cuda-segments.ts'
import type { PackedSegments } from './cuda-segments.ts'
import type { HandleReferences } from './handle-references.ts'
import { isSharedMemory, openSharedMemory, unlinkSharedMemory } from './shared-memory.ts'
import type { VisibleGpus } from './visible-gpus.ts'

type Addon = Pick<NativeAddon, 'dropFileReferences' | 'dropCudaReferences' | 'takeDescriptor'>

/** Handles are references that senders hold for this process; files are those that were opened for them. */
export interface ReleasedCounts {
  handles: number
  files: number
}

/** `sourceOf`: for each requested storage or segment the index of its source, files first; -1 for none. */
export interface OpenedSources {
  fds: number[]
  segments: PackedSegments
  sourceOf: Int32Array<ArrayBuffer>
}

interface SharedFile {
  fd: number
  bytes: number
  index: number
}

// The addon keeps a second descriptor of each while it writes.
const MAX_FILES = 4096

/**
 * The handles of one request. Each file and segment is opened once, and every reference is given back once, whether
 * the request succeeds or fails. Runs on the handle thread. GPU segments are only collected here: a write opens them.
 */
export class RequestHandles {
  readonly #addon: Addon
  readonly #gpus: VisibleGpus | null
  readonly #references: HandleReferences
  readonly #spares: HandleReferences | undefined
  readonly #files = new Map<string, SharedFile>()
  readonly #segments: CudaSegments
  #released = false

  /**
   * `gpus`: null for an engine on the CPU. `spares`: references that are released with the rest, and never opened.
   */
  constructor (references: HandleReferences, addon: Addon, gpus: VisibleGpus | null, spares?: HandleReferences) {
    this.#references = references
    this.#spares = spares
    this.#addon = addon
    this.#gpus = gpus
    this.#segments = new CudaSegments(addon, gpus!)
  }

  /**
   * Opens all files, and finds the GPUs and descriptors of all segments. Throws TENSOR_PAYLOAD (memory is gone, of
   * another user, too short, or on an unreachable GPU) or UNSUPPORTED (a kind of memory that the engine cannot read),
   * with the storage at fault as `cause`.
   */
  openStorages (storages: readonly TensorStorage[]): OpenedSources {
    const sourceOf = new Int32Array(storages.length).fill(-1)
    const cuda: number[] = []
    for (const [index, storage] of storages.entries()) {
      blamed(storage, () => {
        if (storage.kind === 'shared-file') sourceOf[index] = this.#openFile(storage)
        else if (storage.kind === 'cuda') {
          if (this.#gpus === null) throw onCpu()
          sourceOf[index] = this.#segments.add(storage)
          cuda.push(index)
        } else if (storage.kind === 'descriptor') throw byDescriptor()
      })
    }
    // Files come first, and their number is known only now.
    for (const index of cuda) sourceOf[index]! += this.#files.size
    return { fds: [...this.#files.values()].map(({ fd }) => fd), segments: this.#segments.pack(), sourceOf }
  }

  /** The same for segments, for an engine on GPUs. */
  openSegments (list: readonly HandleSegment[]): OpenedSources {
    const sourceOf = Int32Array.from(list, segment => blamed(segment, () => this.#segments.addSegment(segment)))
    return { fds: [], segments: this.#segments.pack(), sourceOf }
  }

  /** Descriptors that were taken out of senders, for the main thread to close after the release. */
  get taken (): number[] {
    return this.#segments.taken
  }

  /** The name of shared memory that disappeared with its sender, or null. */
  findGone (): string | null {
    const { files, counters } = this.#references
    for (const names of [files, counters]) for (const name of names.keys()) if (!isSharedMemory(name)) return name
    return null
  }

  /** Gives back every reference and closes all open files. Never throws; a second call does nothing. */
  release (): ReleasedCounts {
    if (this.#released) return { handles: 0, files: 0 }
    this.#released = true
    let handles = this.#drop(this.#references)
    if (this.#spares !== undefined) handles += this.#drop(this.#spares)
    const files = this.#files.size
    for (const { fd } of this.#files.values()) closeSync(fd)
    this.#files.clear()
    return { handles, files }
  }

  /** Its index among the files. */
  #openFile ({ file: name, bytes }: SharedFileStorage): number {
    let file = this.#files.get(name)
    if (file === undefined) {
      if (this.#files.size >= MAX_FILES) {
        throw new RefitError(
          'TENSOR_PAYLOAD',
          `one request may have ${MAX_FILES} files of shared memory; ` +
            'send flattened buckets, which take one each, or several requests'
        )
      }
      this.#files.set(name, file = { ...openSharedMemory(name), index: this.#files.size })
    }
    if (file.bytes < SHARED_FILE_HEADER + bytes) {
      throw new RefitError(
        'TENSOR_PAYLOAD',
        `shared memory ${name} has ${file.bytes} bytes, but a storage of ${bytes} and its header take ${
          SHARED_FILE_HEADER + bytes
        }`
      )
    }
    return file.index
  }

  /** Returns the number of handles. One file at a time, because there may be more than this process may open. */
  #drop ({ files, counters }: HandleReferences): number {
    let handles = 0
    for (const [name, references] of files) handles += this.#withFile(name, fd => this.#dropFile(name, fd, references))
    for (const [name, slots] of counters) {
      handles += this.#withFile(name, fd => this.#addon.dropCudaReferences(fd, slots))
    }
    return handles
  }

  /** The process that releases the last reference removes the file, because the sender has freed it already. */
  #dropFile (name: string, fd: number, references: number): number {
    if (this.#addon.dropFileReferences(fd, references) === 0) unlinkSharedMemory(name)
    return references
  }

  /** 0 for a file that cannot be opened or counts nothing: the sender may have ended, and its files with it. */
  #withFile (name: string, drop: (fd: number) => number): number {
    const open = this.#files.get(name)
    let fd: number | undefined
    try {
      fd = open?.fd ?? openSharedMemory(name).fd
      return drop(fd)
    } catch {
      return 0
    } finally {
      if (open === undefined && fd !== undefined) closeSync(fd)
    }
  }
}

/** Adds the storage or segment at fault to an error. */
function blamed<T> (cause: TensorStorage | HandleSegment, open: () => T): T {
  try {
    return open()
  } catch (error) {
    throw error instanceof RefitError ? new RefitError(error.code, error.message, { cause }) : error
  }
}

function byDescriptor (): RefitError {
  return new RefitError(
    'UNSUPPORTED',
    'its memory is shared by a file descriptor, which only processes started by the sender can ask for. ' +
      'Call torch.multiprocessing.set_sharing_strategy("file_system") in the sender before it shares tensors'
  )
}

function onCpu (): RefitError {
  return new RefitError(
    'UNSUPPORTED',
    'it lies in the memory of a GPU, and this engine is on the CPU: ' +
      'send tensors on the CPU (.cpu()), or start refit with --device cuda'
  )
}
