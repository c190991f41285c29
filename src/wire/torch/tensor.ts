import { RefitError } from '../../errors.ts'
import type { IpcHandle } from './ipc-handle.ts'
import { clip } from '../strict-json.ts'

/** The place of tensors' bytes. A storage that is released once is one object. */
export type TensorStorage = CudaStorage | SharedFileStorage | DescriptorStorage | MemoryStorage | EmptyStorage

/** Memory of a GPU, exported by CUDA IPC: `bytes` bytes that begin `offset` bytes into the segment of `handle`. */
export interface CudaStorage {
  kind: 'cuda'
  /** The sender's GPU: its index there, or the UUID in lower case without `GPU-` or `MIG-`. */
  device: number | string
  /** One object per segment of one device in a request, however many tensors lie in it. */
  handle: IpcHandle
  offset: number
  bytes: number
  /**
   * The sender's reference counter: a POSIX shared-memory name and a slot (8-byte integers from byte 64 on). It goes
   * down by one, exactly once per handle, after the last read; else the sender's memory is never freed.
   */
  counterFile: string
  counterSlot: number
  /** 64 bytes (as latin1) to open and wait for before the first read; null if the sender has waited itself. */
  event: string | null
}

/**
 * torch's `file_system` strategy: a file in shared memory with an int32 count at its start and the data from
 * SHARED_FILE_HEADER on.
 */
export interface SharedFileStorage {
  kind: 'shared-file'
  /**
   * POSIX shared-memory name, `/torch_...`. The count goes down by one per handle. The process that makes it 0
   * unlinks the file.
   */
  file: string
  /** Path of the socket of torch_shm_manager. */
  manager: string
  /** Bytes of data. The file is SHARED_FILE_HEADER bytes longer. */
  bytes: number
}

/**
 * torch's `file_descriptor` strategy: a process that knows the sender's authkey requests the descriptor once, at a Unix
 * socket.
 */
export interface DescriptorStorage {
  kind: 'descriptor'
  address: string
  key: number
  bytes: number
}

/** Bytes of this process alone, which a weight loader made. */
export interface MemoryStorage {
  kind: 'memory'
  data: Uint8Array
  bytes: number
}

export interface EmptyStorage {
  kind: 'empty'
  bytes: 0
}

export const SHARED_FILE_HEADER = 64

/** A tensor as strided elements of a storage. All of them are checked to lie inside it. */
export interface TensorDescriptor {
  name: string
  /** torch's name: `bfloat16`, `float32`, `uint8`, ... */
  dtype: string
  shape: number[]
  /** In elements, one per dimension, never negative. */
  stride: number[]
  /** Bytes from the start of the storage to the first element. Pieces of a bucket may begin at odd bytes. */
  offset: number
  storage: TensorStorage
}

/** The error for a payload that was read and is not as it should be. */
export function payloadError (message: string, tensor?: string): RefitError {
  if (tensor === undefined) return new RefitError('TENSOR_PAYLOAD', message)
  return new RefitError('TENSOR_PAYLOAD', `tensor ${JSON.stringify(clip(tensor))}: ${message}`, { param: clip(tensor) })
}
