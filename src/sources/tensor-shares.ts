import { closeSync } from 'node:fs'
import { RefitError } from '../errors.ts'
import type { NativeAddon } from '../native.ts'
import { SHARED_FILE_HEADER } from '../wire/torch-tensor.ts'
import type { CudaStorage, SharedFileStorage, TensorStorage } from '../wire/torch-tensor.ts'
import { openSharedMemory, unlinkSharedMemory } from './shared-memory.ts'

type Counts = Pick<NativeAddon, 'dropFileReferences' | 'dropCudaReference'>

/** How many of each there were: shares are references that senders hold for us, files are what was opened for them. */
export interface ShareCounts { shares: number, files: number }

interface SharedFile { fd: number, bytes: number, references: number }

// The addon keeps a second descriptor of each while it writes.
const MAX_FILES = 4096

/**
 * The storages of one request: opened once per file, and every reference given back once, whatever became of the request. Runs on
 * the thread of the shares.
 */
export class TensorShares {
  readonly #counts: Counts
  readonly #storages: readonly TensorStorage[]
  readonly #files = new Map<string, SharedFile>()
  #released = false

  constructor (storages: readonly TensorStorage[], counts: Counts) {
    this.#storages = storages
    this.#counts = counts
  }

  /**
   * Opens all files. Throws TENSOR_PAYLOAD (it is gone, not ours, too short) or UNSUPPORTED (a kind of memory that the engine cannot
   * read), with the storage at fault as `cause`.
   */
  open (device: 'cpu' | 'cuda'): void {
    for (const storage of this.#storages) {
      try {
        this.#open(storage, device)
      } catch (error) {
        throw error instanceof RefitError ? new RefitError(error.code, error.message, { cause: storage }) : error
      }
    }
  }

  /** Of the open files: descriptors, and for each storage of the request which of them it lies in (-1: in none). */
  get opened (): { fds: number[], fileOf: Int32Array<ArrayBuffer> } {
    const names = new Map([...this.#files.keys()].map((name, index) => [name, index]))
    return {
      fds: [...this.#files.values()].map(({ fd }) => fd),
      fileOf: Int32Array.from(this.#storages, storage => storage.kind === 'shared-file' ? names.get(storage.file) ?? -1 : -1)
    }
  }

  /** Gives back every reference and closes what is open. Never throws; a second call does nothing. */
  release (): ShareCounts {
    if (this.#released) return { shares: 0, files: 0 }
    this.#released = true
    const files = this.#files.size
    let shares = 0
    for (const [name, { fd, references }] of this.#files) shares += this.#dropFile(name, fd, references)
    // What was never opened. One at a time: there may be more than this process may open.
    const unopened = new Map<string, number>()
    for (const storage of this.#storages) {
      if (storage.kind === 'shared-file') unopened.set(storage.file, (unopened.get(storage.file) ?? 0) + 1)
    }
    for (const [name, references] of unopened) {
      const left = references - (this.#files.get(name)?.references ?? 0)
      if (left > 0) shares += withFile(name, fd => this.#dropFile(name, fd, left))
    }
    shares += this.#dropCuda()
    this.#files.clear()
    return { shares, files }
  }

  #open (storage: TensorStorage, device: 'cpu' | 'cuda'): void {
    switch (storage.kind) {
      case 'shared-file': return this.#openFile(storage)
      case 'descriptor':
        throw new RefitError('UNSUPPORTED', 'its memory is shared by a file descriptor, which only processes started by the sender can ask for. Call torch.multiprocessing.set_sharing_strategy("file_system") in the sender before it shares tensors')
      case 'cuda':
        throw new RefitError('UNSUPPORTED', device === 'cpu'
          ? 'it lies in the memory of a card, and this engine is on the CPU: send tensors on the CPU (.cpu()), or start refit with --device cuda'
          : 'it lies in the memory of a card, which this version does not read yet: send tensors on the CPU (.cpu())')
      case 'empty':
    }
  }

  #openFile ({ file: name, bytes }: SharedFileStorage): void {
    let file = this.#files.get(name)
    if (file === undefined) {
      if (this.#files.size >= MAX_FILES) throw new RefitError('TENSOR_PAYLOAD', `one request may bring ${MAX_FILES} files of shared memory; send flattened buckets, which take one each, or several requests`)
      this.#files.set(name, file = { ...openSharedMemory(name), references: 0 })
    }
    file.references++
    if (file.bytes < SHARED_FILE_HEADER + bytes) throw new RefitError('TENSOR_PAYLOAD', `shared memory ${name} has ${file.bytes} bytes, but a storage of ${bytes} and its header take ${SHARED_FILE_HEADER + bytes}`)
  }

  /** Whoever takes the last reference removes the file: the sender has freed it already. */
  #dropFile (name: string, fd: number, references: number): number {
    try {
      if (this.#counts.dropFileReferences(fd, references) === 0) unlinkSharedMemory(name)
      return references
    } catch {
      return 0
    } finally {
      closeSync(fd)
    }
  }

  #dropCuda (): number {
    const slots = new Map<string, CudaStorage[]>()
    for (const storage of this.#storages) {
      if (storage.kind !== 'cuda') continue
      const list = slots.get(storage.counterFile)
      if (list === undefined) slots.set(storage.counterFile, [storage])
      else list.push(storage)
    }
    let shares = 0
    for (const [name, list] of slots) {
      shares += withFile(name, fd => {
        try {
          for (const { counterSlot } of list) this.#counts.dropCudaReference(fd, counterSlot)
          return list.length
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

/** The sender may have ended, and its files with it. */
function withFile (name: string, use: (fd: number) => number): number {
  try {
    return use(openSharedMemory(name).fd)
  } catch {
    return 0
  }
}
