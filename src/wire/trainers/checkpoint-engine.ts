import { describePickle, PickleDict, PickleList, PickleObject } from '../pickle/values.ts'
import type { PickleValue } from '../pickle/values.ts'
import { contiguous } from '../torch/bucket.ts'
import { describeUnreadDType, torchItemBytes, torchWeightDType } from '../torch/dtypes.ts'
import { countElements } from '../torch/extent.ts'
import { toSize, toSizes, toTorchDType } from '../torch/fields.ts'
import { salvageNames } from '../torch/names.ts'
import { readPickle } from '../pickle/read.ts'
import { payloadError } from '../torch/tensor.ts'
import type { TensorDescriptor } from '../torch/tensor.ts'
import { checkTensorCount, nameTensor, toTensorName, toWeightName } from '../torch/tensor-name.ts'
import { bucketMeta, directHandle } from './verl-buckets.ts'

// The messages of checkpoint-engine's parameter server to an engine's worker, as pickles (MoonshotAI/checkpoint-engine,
// checkpoint_engine/worker.py and ps.py): first the handle of one flat buffer, then for each bucket a list of the
// places of tensors in it, and None twice at the end. An exception may come at any time and ends the exchange. The
// worker replies to each message with an empty message or an error's text. verl sends nearly the same messages to
// vLLM's workers (verl-buckets.ts), but ignores the replies.

/** A tensor in the buffer: whole and row-major. */
export interface BufferPiece {
  name: string
  /** torch's name. */
  dtype: string
  shape: number[]
  /** Bytes from the buffer's first one. */
  offset: number
}

export interface Bucket {
  type: 'bucket'
  pieces: BufferPiece[]
  /** Only from verl: nothing follows the last one. */
  isLast?: boolean
  /** Only from verl: the only tensor does not lie in the buffer, and has a handle of its own. */
  isDirect?: boolean
}

export type ServerMessage =
  | Bucket
  /** None: the first one ends the writes, the second one ends the exchange. */
  | { type: 'none' }
  /** An exception: a worker has failed, and all workers stop. */
  | { type: 'stop', reason: string }

/**
 * Reads a message after the handle. `isAdapter`: parts of a LoRA adapter are welcome; otherwise they are refused.
 * Throws PICKLE_*, TENSOR_PAYLOAD or UNSUPPORTED. Nothing is imported or called.
 */
export function readServerMessage (bytes: Uint8Array, isAdapter = false): ServerMessage {
  const toName = isAdapter ? toTensorName : toWeightName
  const read = (piece: PickleValue): BufferPiece => readPiece(piece, toName)
  // An exception may be of any class and is read as a record of it.
  const root = readPickle(bytes, salvageNames)
  if (root === null) return { type: 'none' }
  if (root instanceof PickleList) {
    checkTensorCount(root.items.length)
    return { type: 'bucket', pieces: root.items.map(read) }
  }
  const verl = bucketMeta(root)
  if (verl !== null) {
    checkTensorCount(verl.entries.length)
    const isDirect = directHandle(root) !== undefined
    const own = verl.entries.find(entry => entry instanceof PickleDict && entry.get('handle') != null)
    if (own !== undefined && !isDirect) throw payloadError('a tensor with a handle of its own comes with others')
    return { type: 'bucket', pieces: verl.entries.map(read), isLast: verl.isLast, isDirect }
  }
  if (isException(root)) return { type: 'stop', reason: reasonOf(root) }
  throw payloadError(`${describePickle(root)} where a list of tensors, None or an exception was expected`)
}

/**
 * The kind of a message after which its sender sends no other: an exception, or verl's last bucket, whatever its
 * tensors are. Throws PICKLE_*.
 */
export function endOfExchange (bytes: Uint8Array): 'stop' | 'bucket' | null {
  const root = readPickle(bytes, salvageNames)
  if (isException(root)) return 'stop'
  return bucketMeta(root)?.isLast === true ? 'bucket' : null
}

function isException (root: PickleValue): root is PickleObject {
  return root instanceof PickleObject && root.name.role === 'unknown'
}

function readPiece (value: PickleValue, toName: (value: PickleValue | undefined) => string): BufferPiece {
  if (!(value instanceof PickleDict)) {
    throw payloadError(`a bucket holds ${describePickle(value)}, not a dict of name, dtype, shape and offset`)
  }
  const name = toName(value.get('name'))
  try {
    const dtype = toTorchDType(value.get('dtype'))
    if (torchWeightDType(dtype) === undefined) throw payloadError(describeUnreadDType(dtype), name)
    const shape = value.get('shape')
    const sizes = [...toSizes(shape instanceof PickleList ? shape.items : shape, 'its shape')]
    return { name, dtype, shape: sizes, offset: toSize(value.get('offset'), 'its offset') }
  } catch (error) {
    throw nameTensor(error, name)
  }
}

/** The tensor's place in memory. Throws TENSOR_PAYLOAD if that is not inside the buffer. */
export function placePiece ({ name, dtype, shape, offset }: BufferPiece, buffer: TensorDescriptor): TensorDescriptor {
  const bytes = countElements(shape, name) * torchItemBytes(dtype)!
  const size = buffer.shape[0]!
  if (offset + bytes > size) {
    throw payloadError(
      `${dtype} [${shape.join(', ')}] from byte ${offset} on ends at byte ${
        offset + bytes
      }, and the buffer has ${size}`,
      name
    )
  }
  return { name, dtype, shape, stride: contiguous(shape), offset: buffer.offset + offset, storage: buffer.storage }
}

/** Throws TENSOR_PAYLOAD unless it is flat bytes. */
export function checkBuffer ({ dtype, shape, stride, name }: TensorDescriptor): void {
  if (dtype === 'uint8' && shape.length === 1 && (shape[0]! < 2 || stride[0] === 1)) return
  throw payloadError(
    `it is ${dtype} [${shape.join(', ')}] with strides [${stride.join(', ')}], and a buffer is flat uint8`,
    name
  )
}

/** `RuntimeError: Some workers failed`. */
function reasonOf ({ name, args }: PickleObject): string {
  const text = args.flat().find(argument => typeof argument === 'string')
  return text === undefined ? name.name : `${name.name}: ${text.slice(0, 1000)}`
}
