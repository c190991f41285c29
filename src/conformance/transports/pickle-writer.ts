// Pickles as torch's ForkingPickler writes them for tensors in shared memory (the file_system strategy). See
// src/wire/torch for their reader.

export const PROTO4 = '\x80\x04'

/** Opcodes as latin1 text, numbers as bytes, and bytes, one after another. */
export function assemble (...parts: Array<string | number | Uint8Array>): Buffer {
  return Buffer.concat(
    parts.map(part =>
      typeof part === 'string' ? Buffer.from(part, 'latin1') : typeof part === 'number' ? Buffer.from([part]) : part
    )
  )
}

/** SHORT_BINUNICODE, or BINUNICODE for long texts. */
export function str (text: string): Buffer {
  const bytes = Buffer.from(text)
  return bytes.length < 256 ? assemble('\x8c', bytes.length, bytes) : assemble('X', u32(bytes.length), bytes)
}

/** BINBYTES */
export function bin (bytes: Uint8Array): Buffer {
  return assemble('B', u32(bytes.length), bytes)
}

export function global (module: string, name: string): Buffer {
  return assemble(str(module), str(name), '\x93')
}

export function u32 (value: number): Buffer {
  const bytes = Buffer.alloc(4)
  bytes.writeUInt32LE(value)
  return bytes
}

export function u64 (value: bigint): Buffer {
  const bytes = Buffer.alloc(8)
  bytes.writeBigUInt64LE(value)
  return bytes
}

/** BININT1, BININT or LONG1 */
export function int (value: number): Buffer {
  if (value >= 0 && value < 256) return assemble('K', value)
  return value < 2 ** 31 ? assemble('J', u32(value)) : assemble('\x8a', 8, u64(BigInt(value)))
}

export function tuple (values: number[]): Buffer {
  return assemble('(', ...values.map(int), 't')
}

/** Strides in elements of a row-major tensor. */
export function contiguous (shape: number[]): number[] {
  return shape.map((_, axis) => shape.slice(axis + 1).reduce((a, b) => a * b, 1))
}

/** A tensor in a file of shared memory. */
export interface SharedTensor {
  name: string
  /** `/torch_...`, and the bytes of the storage. */
  memory: { name: string, bytes: number }
  /** Path of the manager's socket. Default one that does not exist, which refit does not open. */
  manager?: string
  shape: number[]
  /** Default bfloat16. */
  dtype?: string
  /** Elements; default contiguous from 0. */
  stride?: number[]
  offset?: number
}

const NO_MANAGER = '/tmp/torch-shm-dir-test/manager.sock'
const REDUCTIONS = 'torch.multiprocessing.reductions'
const BUCKETS = 'sglang.srt.weight_sync.tensor_bucket'

/** An element of `serialized_named_tensors`: a list of (name, tensor). */
export function tensorEntry (tensors: readonly SharedTensor[]): string {
  const items = tensors.map(tensor => assemble(str(tensor.name), pickledTensor(tensor), '\x86'))
  return assemble(PROTO4, ']', '(', ...items, 'e', '.').toString('base64')
}

/** The call that ForkingPickler writes for one tensor. */
export function pickledTensor (tensor: SharedTensor): Buffer {
  const { memory, manager = NO_MANAGER, shape, dtype = 'bfloat16', stride, offset = 0 } = tensor
  const storage = assemble(
    global(REDUCTIONS, 'rebuild_storage_filename'),
    '(',
    global('torch.storage', 'UntypedStorage'),
    bin(Buffer.from(manager)),
    bin(Buffer.from(memory.name)),
    int(memory.bytes),
    't',
    'R'
  )
  const typed = assemble(global(REDUCTIONS, 'rebuild_typed_storage'), '(', storage, global('torch', dtype), 't', 'R')
  const metadata = assemble('(', int(offset), size(shape), tuple(stride ?? contiguous(shape)), '\x89', 't')
  return assemble(global(REDUCTIONS, 'rebuild_tensor'), '(', global('torch', 'Tensor'), typed, metadata, 't', 'R')
}

/** A tensor's place in a flattened bucket, in bytes. */
export interface BucketPiece {
  name: string
  dtype: string
  shape: number[]
  start: number
  end: number
}

/** The same with load_format `flattened_bucket`: one tensor of bytes, and the places in it. */
export function bucketEntry (flat: SharedTensor, pieces: readonly BucketPiece[]): string {
  const items = pieces.map(({ name, dtype, shape, start, end }) =>
    assemble(
      global(BUCKETS, 'FlattenedTensorMetadata'),
      ')\x81}(',
      ...[str('name'), str(name), str('shape'), size(shape), str('dtype'), global('torch', dtype)],
      ...[str('start_idx'), int(start), str('end_idx'), int(end), str('numel'), int(end - start)],
      'ub'
    )
  )
  return assemble(PROTO4, '}(', str('flattened_tensor'), pickledTensor(flat), str('metadata'), '](', ...items, 'eu.')
    .toString(
      'base64'
    )
}

function size (shape: number[]): Buffer {
  return assemble(global('torch', 'Size'), tuple(shape), '\x85', 'R')
}
