import { describePickle, PickleDict, PickleList, PickleObject } from '../pickle/values.ts'
import type { PickleValue } from '../pickle/values.ts'
import { torchItemBytes } from './dtypes.ts'
import { countElements } from './extent.ts'
import { toSize, toSizes, toTorchDType } from './fields.ts'
import { isOffer, readTensor } from './rebuild.ts'
import type { StorageTable } from './storage.ts'
import { payloadError } from './tensor.ts'
import type { TensorDescriptor } from './tensor.ts'
import { checkTensorCount, nameTensor, toTensorName, toWeightName } from './tensor-name.ts'

// SGLang's FlattenedTensorBucket: tensors one after another in one flat tensor, and a list of their places. Since late
// 2025 the flat tensor is of bytes and the indices count bytes, without any alignment. Before, it had the dtype of all
// its tensors, and the indices counted elements. The flat tensor's dtype shows which; the lengths are checked against
// it.

/**
 * Every tensor of a bucket, as a view of the flat tensor's storage. `gpu`: the rank's own. `isAdapter`: parts of an
 * adapter are welcome; otherwise they are refused. Throws TENSOR_PAYLOAD and UNSUPPORTED.
 */
export function readBucket (
  root: PickleValue,
  storages: StorageTable,
  { gpu, isAdapter = false }: { gpu?: string | undefined, isAdapter?: boolean } = {}
): TensorDescriptor[] {
  const flat = root instanceof PickleDict ? root.get('flattened_tensor') : undefined
  const metadata = root instanceof PickleDict ? root.get('metadata') : undefined
  if (flat === undefined || !(metadata instanceof PickleList)) {
    throw payloadError(
      `a flattened bucket is a dict of flattened_tensor and metadata, got ${
        describePickle(root)
      }; is load_format meant?`
    )
  }
  checkTensorCount(metadata.items.length)
  const bucket = readFlat(flat, storages, gpu)
  return metadata.items.map(item => readPiece(item, bucket, isAdapter ? toTensorName : toWeightName))
}

/** True if ranks may take different handles. */
export function isOfferedBucket (root: PickleValue): boolean {
  return root instanceof PickleDict && isOffer(root.get('flattened_tensor'))
}

function readFlat (value: PickleValue, storages: StorageTable, gpu?: string): TensorDescriptor {
  const flat = readTensor('flattened_tensor', value, storages, gpu)
  const { shape, stride } = flat
  if (shape.length !== 1 || (shape[0]! > 1 && stride[0] !== 1)) {
    throw payloadError(
      `shape [${shape.join(', ')}] with strides [${stride.join(', ')}] is not flat`,
      flat.name
    )
  }
  return flat
}

function readPiece (
  value: PickleValue,
  flat: TensorDescriptor,
  toName: (value: PickleValue | undefined) => string
): TensorDescriptor {
  const state = value instanceof PickleObject && value.name.role === 'FlattenedTensorMetadata' ? value.state : null
  if (state === null) throw payloadError(`metadata holds ${describePickle(value)}, not FlattenedTensorMetadata`)
  const name = toName(state.get('name'))
  try {
    return placePiece(name, state, flat)
  } catch (error) {
    throw nameTensor(error, name)
  }
}

function placePiece (name: string, state: PickleDict, flat: TensorDescriptor): TensorDescriptor {
  const dtype = toTorchDType(state.get('dtype'))
  const shape = toSizes(state.get('shape'), 'its shape')
  const start = toSize(state.get('start_idx'), 'start_idx')
  const end = toSize(state.get('end_idx'), 'end_idx')
  const numel = toSize(state.get('numel'), 'numel')
  const elements = countElements(shape)
  const inBytes = flat.dtype === 'uint8'
  if (!inBytes && dtype !== flat.dtype) {
    throw payloadError(`it is ${dtype} in a bucket of ${flat.dtype}; buckets of several dtypes are flattened as uint8`)
  }
  const length = inBytes ? elements * torchItemBytes(dtype)! : elements
  const unit = inBytes ? 'bytes' : 'elements'
  if (end - start !== length) {
    throw payloadError(
      `${dtype} [${shape.join(', ')}] takes ${length} ${unit}, but start_idx ${start} and end_idx ${end} hold ${
        end - start
      }`
    )
  }
  if (end > flat.shape[0]!) throw payloadError(`it ends at ${end}, but the bucket has ${flat.shape[0]!} ${unit}`)
  if (numel !== length && numel !== elements) {
    throw payloadError(`numel is ${numel}, but [${shape.join(', ')}] has ${elements} elements`)
  }
  return {
    name,
    dtype,
    shape,
    stride: contiguous(shape),
    offset: flat.offset + start * torchItemBytes(flat.dtype)!,
    storage: flat.storage
  }
}

/** Strides of a row-major tensor, as in torch (a dimension of 0 counts as 1). */
export function contiguous (shape: readonly number[]): number[] {
  const stride = new Array<number>(shape.length)
  let step = 1
  for (let axis = shape.length - 1; axis >= 0; axis--) {
    stride[axis] = step
    step *= Math.max(shape[axis]!, 1)
  }
  return stride
}
