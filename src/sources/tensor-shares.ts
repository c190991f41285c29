import { closeSync } from 'node:fs'
import { RefitError } from '../errors.ts'
import type { NativeAddon } from '../native.ts'
import { SHARED_FILE_HEADER } from '../wire/torch-tensor.ts'
import type { SharedFileStorage, TensorStorage } from '../wire/torch-tensor.ts'
import { CudaSegments } from './cuda-segments.ts'
import type { PackedSegments } from './cuda-segments.ts'
import { isSharedMemory, openSharedMemory, unlinkSharedMemory } from './shared-memory.ts'
import type { VisibleCards } from './visible-cards.ts'

type Addon = Pick<NativeAddon, 'dropFileReferences' | 'dropCudaReferences' | 'takeDescriptor'>

/** How many of each there were: shares are references that senders hold for us, files are what was opened for them. */
export interface ShareCounts { shares: number, files: number }

interface SharedFile { fd: number, bytes: number, index: number, references: number }

/** The storages of a request; `spares` are given back with the others, and never opened. */
export interface RequestShares { storages: readonly TensorStorage[], spares?: readonly TensorStorage[] }

// The addon keeps a second descriptor of each while it writes.
const MAX_FILES = 4096

/**
 * The storages of one request: opened once per file and segment, and every reference given back once, whatever became of the request.
 * Runs on the thread of the shares. Segments of cards are only collected here: a write opens them.
 */
export class TensorShares {
  readonly #addon: Addon
  readonly #cards: VisibleCards | null
  readonly #storages: readonly TensorStorage[]
  readonly #spares: readonly TensorStorage[]
  readonly #files = new Map<string, SharedFile>()
  #segments: CudaSegments | undefined
  #released = false

  /** `cards`: null for an engine on the CPU. */
  constructor ({ storages, spares = [] }: RequestShares, addon: Addon, cards: VisibleCards | null) {
    this.#storages = storages
    this.#spares = spares
    this.#addon = addon
    this.#cards = cards
  }

  /**
   * Opens all files, and finds the cards and descriptors of all segments. Throws TENSOR_PAYLOAD (it is gone, not ours, too short, on a
   * card out of reach) or UNSUPPORTED (a kind of memory that the engine cannot read), with the storage at fault as `cause`.
   */
  open (): { fds: number[], segments: PackedSegments, sourceOf: Int32Array<ArrayBuffer> } {
    const segments = this.#segments = new CudaSegments(this.#addon, this.#cards!)
    const sourceOf = new Int32Array(this.#storages.length).fill(-1)
    const cuda: number[] = []
    for (const [index, storage] of this.#storages.entries()) {
      try {
        if (storage.kind === 'shared-file') sourceOf[index] = this.#openFile(storage)
        else if (storage.kind === 'cuda') {
          if (this.#cards === null) throw onCpu()
          sourceOf[index] = segments.add(storage)
          cuda.push(index)
        } else if (storage.kind === 'descriptor') throw byDescriptor()
      } catch (error) {
        throw error instanceof RefitError ? new RefitError(error.code, error.message, { cause: storage }) : error
      }
    }
    // Files come first, and how many there are is known now.
    for (const index of cuda) sourceOf[index]! += this.#files.size
    return { fds: [...this.#files.values()].map(({ fd }) => fd), segments: segments.pack(), sourceOf }
  }

  /** Descriptors that were taken out of senders, for the main thread to close after the release. */
  get taken (): number[] { return this.#segments?.taken ?? [] }

  /** The name of shared memory that went with its sender, or null while all are there. */
  findGone (): string | null {
    const names = new Set<string>()
    for (const storage of this.#storages) {
      if (storage.kind === 'cuda') names.add(storage.counterFile)
      else if (storage.kind === 'shared-file') names.add(storage.file)
    }
    for (const name of names) if (!isSharedMemory(name)) return name
    return null
  }

  /** Gives back every reference and closes what is open. Never throws; a second call does nothing. */
  release (): ShareCounts {
    if (this.#released) return { shares: 0, files: 0 }
    this.#released = true
    const files = this.#files.size
    const all = [...this.#storages, ...this.#spares]
    let shares = 0
    for (const [name, { fd, references }] of this.#files) shares += this.#dropFile(name, fd, references)
    // What was never opened. One at a time: there may be more than this process may open.
    const unopened = new Map<string, number>()
    for (const storage of all) {
      if (storage.kind === 'shared-file') unopened.set(storage.file, (unopened.get(storage.file) ?? 0) + 1)
    }
    for (const [name, references] of unopened) {
      const left = references - (this.#files.get(name)?.references ?? 0)
      if (left > 0) shares += withFile(name, fd => this.#dropFile(name, fd, left))
    }
    shares += this.#dropCuda(all)
    this.#files.clear()
    return { shares, files }
  }

  /** Its index among the files. */
  #openFile ({ file: name, bytes }: SharedFileStorage): number {
    let file = this.#files.get(name)
    if (file === undefined) {
      if (this.#files.size >= MAX_FILES) throw new RefitError('TENSOR_PAYLOAD', `one request may bring ${MAX_FILES} files of shared memory; send flattened buckets, which take one each, or several requests`)
      this.#files.set(name, file = { ...openSharedMemory(name), index: this.#files.size, references: 0 })
    }
    file.references++
    if (file.bytes < SHARED_FILE_HEADER + bytes) throw new RefitError('TENSOR_PAYLOAD', `shared memory ${name} has ${file.bytes} bytes, but a storage of ${bytes} and its header take ${SHARED_FILE_HEADER + bytes}`)
    return file.index
  }

  /** Whoever takes the last reference removes the file: the sender has freed it already. */
  #dropFile (name: string, fd: number, references: number): number {
    try {
      if (this.#addon.dropFileReferences(fd, references) === 0) unlinkSharedMemory(name)
      return references
    } catch {
      return 0
    } finally {
      closeSync(fd)
    }
  }

  /** One reference of each share: a slot stands for one. */
  #dropCuda (storages: readonly TensorStorage[]): number {
    const slots = new Map<string, number[]>()
    for (const storage of storages) {
      if (storage.kind !== 'cuda') continue
      const list = slots.get(storage.counterFile)
      if (list === undefined) slots.set(storage.counterFile, [storage.counterSlot])
      else list.push(storage.counterSlot)
    }
    let shares = 0
    for (const [name, list] of slots) {
      shares += withFile(name, fd => {
        try {
          return this.#addon.dropCudaReferences(fd, Int32Array.from(list))
        } catch {
          return 0
        } finally {
          closeSync(fd)
        }
      })
    }
    return shares
  }
}

function byDescriptor (): RefitError {
  return new RefitError('UNSUPPORTED', 'its memory is shared by a file descriptor, which only processes started by the sender can ask for. Call torch.multiprocessing.set_sharing_strategy("file_system") in the sender before it shares tensors')
}

function onCpu (): RefitError {
  return new RefitError('UNSUPPORTED', 'it lies in the memory of a card, and this engine is on the CPU: send tensors on the CPU (.cpu()), or start refit with --device cuda')
}

/** The sender may have ended, and its files with it. */
function withFile (name: string, use: (fd: number) => number): number {
  try {
    return use(openSharedMemory(name).fd)
  } catch {
    return 0
  }
}
