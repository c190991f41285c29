import { closeSync, existsSync, ftruncateSync, openSync, readSync, unlinkSync, writeSync } from 'node:fs'
import type { Test } from 'tap'
import { assemble, bin, global, PROTO4, str, u32, u64 } from './pickles.ts'

// Tensors in shared memory without torch: files as libshm makes them, and pickles that name them.

const HEADER = 64
let made = 0

export interface SharedMemory {
  /** `/torch_...` */
  name: string
  path: string
  bytes: number
  /** Number of references, and whether the file still exists. */
  count: () => number
  exists: () => boolean
  truncate: (bytes: number) => void
  write: (data: Uint8Array) => void
}

/** A file of shared memory with `count` references, the sender's own included. */
export function sharedMemory (t: Test, data: Uint8Array, count = 2): SharedMemory {
  const name = `/torch_${process.pid}_${Math.floor(Math.random() * 1e9)}_${made++}`
  const path = `/dev/shm${name}`
  const fd = openSync(path, 'wx+', 0o600)
  const head = Buffer.alloc(HEADER)
  t.teardown(() => {
    closeSync(fd)
    if (existsSync(path)) unlinkSync(path)
  })
  head.writeInt32LE(count)
  writeSync(fd, head, 0, HEADER, 0)
  writeSync(fd, data, 0, data.length, HEADER)
  return {
    name,
    path,
    bytes: data.length,
    count: () => {
      readSync(fd, head, 0, 4, 0)
      return head.readInt32LE()
    },
    exists: () => existsSync(path),
    truncate: bytes => {
      ftruncateSync(fd, bytes)
    },
    write: data => {
      writeSync(fd, data, 0, data.length, HEADER)
    }
  }
}

export interface SharedTensor {
  name: string
  memory: Pick<SharedMemory, 'name' | 'bytes'>
  shape: number[]
  /** Default bfloat16. */
  dtype?: string
  /** Elements; default contiguous from 0. */
  stride?: number[]
  offset?: number
}

const REDUCTIONS = 'torch.multiprocessing.reductions'

/**
 * An element of `serialized_named_tensors`: a list of (name, tensor) as ForkingPickler writes it under the file_system
 * strategy.
 */
export function tensorEntry (tensors: SharedTensor[]): string {
  const items = tensors.map(tensor => assemble(str(tensor.name), pickledTensor(tensor), '\x86'))
  return assemble(PROTO4, ']', '(', ...items, 'e', '.').toString('base64')
}

/** The call that ForkingPickler writes for one. */
export function pickledTensor ({ memory, shape, dtype = 'bfloat16', stride, offset = 0 }: SharedTensor): Buffer {
  const storage = assemble(
    global(REDUCTIONS, 'rebuild_storage_filename'),
    '(',
    global('torch.storage', 'UntypedStorage'),
    bin(Buffer.from('/tmp/torch-shm-dir-test/manager.sock')),
    bin(Buffer.from(memory.name)),
    int(memory.bytes),
    't',
    'R'
  )
  const typed = assemble(global(REDUCTIONS, 'rebuild_typed_storage'), '(', storage, global('torch', dtype), 't', 'R')
  const size = assemble(global('torch', 'Size'), tuple(shape), '\x85', 'R')
  const metadata = assemble('(', int(offset), size, tuple(stride ?? contiguous(shape)), '\x89', 't')
  return assemble(global(REDUCTIONS, 'rebuild_tensor'), '(', global('torch', 'Tensor'), typed, metadata, 't', 'R')
}

export function tuple (values: number[]): Buffer {
  return assemble('(', ...values.map(int), 't')
}

/** BININT1, BININT or LONG1 */
export function int (value: number): Buffer {
  if (value >= 0 && value < 256) return assemble('K', value)
  return value < 2 ** 31 ? assemble('J', u32(value)) : assemble('\x8a', 8, u64(BigInt(value)))
}

export function contiguous (shape: number[]): number[] {
  return shape.map((_, axis) => shape.slice(axis + 1).reduce((a, b) => a * b, 1))
}
