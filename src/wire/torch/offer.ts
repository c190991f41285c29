import { RefitError } from '../../errors.ts'
import { describePickle, PickleList } from '../pickle/values.ts'
import type { PickleValue } from '../pickle/values.ts'
import type { TensorRequestBody } from './body.ts'
import { contiguous } from './bucket.ts'
import { isGpuDict, toGpuUuid } from './gpus.ts'
import { readDTypeText } from './dtype-text.ts'
import { describeUnreadDType, torchItemBytes, torchWeightDType } from './dtypes.ts'
import { countElements } from './extent.ts'
import { readPayload } from './payload.ts'
import { isOffer, readTensor } from './rebuild.ts'
import { StorageTable } from './storage.ts'
import { payloadError } from './tensor.ts'
import type { TensorDescriptor } from './tensor.ts'
import { checkTensorCount, nameTensor, toWeightName } from './tensor-name.ts'

// vLLM's IPC transfer (weight_transfer/ipc_engine.py): names, dtypes and shapes are in the request, and only the
// handles are pickled, by the UUID of the GPU that they lie on. Each engine takes the handles of its own GPUs; the
// others are for other engines.

export interface Offer {
  names: readonly string[]
  dtypes: readonly string[]
  shapes: ReadonlyArray<readonly number[]>
  /** Null: a handle for each tensor. Else one handle for a flat tensor that holds them all: the size of each. */
  sizes: readonly number[] | null
  /** The unit of `sizes`. With `elements` there is one dtype, which is also that of the flat tensor. */
  unit: 'bytes' | 'elements'
}

interface Wanted {
  name: string
  dtype: string
  shape: number[]
  bytes: number
}

const WHERE = 'ipc_handles_pickled'

/**
 * Reads the tensors that each rank takes of an offer; nothing is opened. `gpus`: the UUID of each rank's. Throws
 * INVALID_REQUEST for lists that do not fit together, UNSUPPORTED for an engine without GPUs, PICKLE_MALFORMED,
 * PICKLE_REFUSED, PICKLE_LIMIT or TENSOR_PAYLOAD.
 */
export function readOfferBody (
  entry: string,
  offer: Offer,
  ranks: number,
  gpus: readonly string[]
): TensorRequestBody {
  if (gpus.length === 0) {
    throw new RefitError('UNSUPPORTED', `${WHERE}: handles of memory on GPUs, and this engine computes on the CPU`, {
      param: WHERE
    })
  }
  const wanted = readWanted(offer)
  const root = readPayload(entry)
  const storages = new StorageTable()
  const own = Array.from({ length: ranks }, (_, rank) => toGpuUuid(gpus[rank] ?? ''))
  const handles = offer.sizes === null ? listOf(root, wanted) : [root]
  const read = (gpu: string | undefined): TensorDescriptor[] =>
    offer.sizes === null ? readEach(wanted, handles, storages, gpu) : readFlat(wanted, root, offer, storages, gpu)
  const shared = handles.some(isOffer) ? undefined : read(undefined)
  return { ranks: own.map(gpu => shared ?? read(gpu)), storages: storages.list, spares: [] }
}

/**
 * The exports of a sender (reducer calls, each with a reference of its own) that ranks on `gpus` take; none if the
 * entry cannot be read.
 */
export function offeredExports (entry: string, gpus: readonly string[]): string[] {
  try {
    const root = readPayload(entry)
    const storages = new StorageTable()
    for (const gpu of gpus) readTensor('', root, storages, toGpuUuid(gpu))
    return storages.list.flatMap(storage =>
      storage.kind === 'cuda' ? [`${storage.counterFile}/${storage.counterSlot}`] : []
    )
  } catch {
    return []
  }
}

function readWanted ({ names, dtypes, shapes, sizes, unit }: Offer): Wanted[] {
  const count = names.length
  checkTensorCount(count)
  for (
    const [field, list] of Object.entries({
      dtype_names: dtypes,
      shapes,
      ...sizes === null ? {} : { [unit === 'bytes' ? 'tensor_sizes' : 'sizes']: sizes }
    })
  ) {
    if (list.length !== count) {
      throw new RefitError(
        'INVALID_REQUEST',
        `${field} has ${list.length} entries and names ${count}; expected the same number`,
        { param: field }
      )
    }
  }
  return names.map((text, index) => {
    const name = toWeightName(text)
    try {
      const dtype = readDTypeText(dtypes[index]!)?.name
      if (dtype === undefined) {
        throw payloadError(`${JSON.stringify(dtypes[index]!.slice(0, 100))} is no dtype of torch`)
      }
      if (torchWeightDType(dtype) === undefined) throw payloadError(describeUnreadDType(dtype))
      const shape = [...shapes[index]!]
      const elements = countElements(shape)
      const bytes = elements * torchItemBytes(dtype)!
      const size = sizes?.[index]
      const expected = unit === 'bytes' ? bytes : elements
      if (size !== undefined && size !== expected) {
        throw payloadError(`${dtype} [${shape.join(', ')}] takes ${expected} ${unit}, but its size is ${size}`)
      }
      return { name, dtype, shape, bytes }
    } catch (error) {
      throw nameTensor(error, name)
    }
  })
}

function listOf (root: PickleValue, wanted: readonly Wanted[]): readonly PickleValue[] {
  if (isGpuDict(root)) {
    throw payloadError(
      `${WHERE} is one handle for all tensors, and the request does not say how much each takes of it (tensor_sizes)`
    )
  }
  const items = root instanceof PickleList ? root.items : root
  if (!Array.isArray(items)) {
    throw payloadError(
      `${WHERE} holds ${describePickle(root)}; expected a list with a dict {GPU: handle} for each tensor`
    )
  }
  if (items.length !== wanted.length) {
    throw new RefitError(
      'INVALID_REQUEST',
      `${WHERE} has ${items.length} entries and names ${wanted.length}; expected the same number`,
      { param: WHERE }
    )
  }
  return items
}

function readEach (
  wanted: readonly Wanted[],
  handles: readonly PickleValue[],
  storages: StorageTable,
  gpu: string | undefined
): TensorDescriptor[] {
  return wanted.map(({ name, dtype, shape }, index) => {
    const tensor = readTensor(name, requireDict(handles[index], name), storages, gpu)
    if (
      tensor.dtype !== dtype || tensor.shape.length !== shape.length ||
      tensor.shape.some((size, axis) => size !== shape[axis])
    ) {
      throw payloadError(
        `its handle is of ${tensor.dtype} [${tensor.shape.join(', ')}], and it is announced as ${dtype} [${
          shape.join(', ')
        }]`,
        name
      )
    }
    return tensor
  })
}

function readFlat (
  wanted: readonly Wanted[],
  root: PickleValue,
  { unit }: Offer,
  storages: StorageTable,
  gpu: string | undefined
): TensorDescriptor[] {
  const flat = readTensor('the packed tensor', requireDict(root, 'the packed tensor'), storages, gpu)
  const { shape, stride, storage } = flat
  if (shape.length !== 1 || (shape[0]! > 1 && stride[0] !== 1)) {
    throw payloadError(
      `shape [${shape.join(', ')}] with strides [${stride.join(', ')}] is not flat`,
      flat.name
    )
  }
  if (unit === 'bytes' && flat.dtype !== 'uint8') {
    throw payloadError(
      `it is of ${flat.dtype}; expected uint8, whose bytes tensor_sizes count`,
      flat.name
    )
  }
  const end = flat.offset + shape[0]! * torchItemBytes(flat.dtype)!
  let at = flat.offset
  return wanted.map(({ name, dtype, shape, bytes }) => {
    if (unit === 'elements' && dtype !== flat.dtype) {
      throw payloadError(`it is announced as ${dtype}, and the packed tensor is of ${flat.dtype}`, name)
    }
    const offset = at
    at += bytes
    if (at > end) {
      throw payloadError(
        `it ends at byte ${at - flat.offset}, and the packed tensor has ${end - flat.offset} bytes`,
        name
      )
    }
    return { name, dtype, shape, stride: contiguous(shape), offset, storage }
  })
}

function requireDict (value: PickleValue | undefined, name: string): PickleValue {
  if (isGpuDict(value)) return value
  throw payloadError(`${describePickle(value)} where a dict {GPU: handle} was expected`, name)
}
