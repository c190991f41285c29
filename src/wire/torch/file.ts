import { readPickle } from '../pickle/read.ts'
import type { PickleNames } from '../pickle/read.ts'
import { describePickle, PickleName, PickleObject } from '../pickle/values.ts'
import type { PickleValue } from '../pickle/values.ts'
import { torchItemBytes, torchStorageDType } from './dtypes.ts'
import { countElements } from './extent.ts'
import { toSize, toSizes } from './fields.ts'
import { torchNames } from './names.ts'
import { payloadError } from './tensor.ts'
import { zipEntries } from '../zip-entries.ts'

// torch.save's format since 1.6: a zip archive with a pickle. The pickle's persistent ids name storages, which are
// other entries.

/** A tensor that a file holds, row-major. */
export interface FileTensor {
  dtype: string
  shape: number[]
  data: Uint8Array
}

const REBUILD = new PickleName('torch._utils', '_rebuild_tensor_v2', 'call', 'file tensor')
const STORAGE = new PickleName('pickle', 'persistent_load', 'call', 'file storage')

const names: PickleNames = (module, name) => {
  if (module === REBUILD.module && name === REBUILD.name) return REBUILD
  if (module === STORAGE.module && name === STORAGE.name) return STORAGE
  return torchNames(module, name)
}

/**
 * A file of torch.save, as data. `tensor` reads a value that stands for a tensor. Throws PICKLE_* and TENSOR_PAYLOAD.
 */
export function readTorchFile (
  bytes: Uint8Array
): { root: PickleValue, tensor: (value: PickleValue | undefined) => FileTensor } {
  const entries = zipEntries(bytes)
  const [path] = [...entries.keys()].filter(name => /^[^/]+\/data\.pkl$/.test(name))
  if (path === undefined) throw payloadError('it is no file of torch.save: it has no data.pkl')
  const folder = path.slice(0, path.indexOf('/'))
  const order = entries.get(`${folder}/byteorder`)
  if (order !== undefined && Buffer.from(order).toString('latin1') !== 'little') {
    throw payloadError('it was saved on a machine of another byte order')
  }
  return {
    root: readPickle(entries.get(path)!, names),
    tensor: value => readTensor(value, key => entries.get(`${folder}/data/${key}`))
  }
}

function readTensor (value: PickleValue | undefined, find: (key: string) => Uint8Array | undefined): FileTensor {
  if (!(value instanceof PickleObject) || value.name !== REBUILD) {
    throw payloadError(`${describePickle(value)} where a tensor was expected`)
  }
  const [storage, start, size, stride] = value.args
  const { dtype, data } = readStorage(storage, find)
  const shape = toSizes(size, 'its shape')
  const strides = toSizes(stride, 'its stride')
  const itemBytes = torchItemBytes(dtype)!
  const elements = countElements(shape)
  let step = 1
  for (let axis = shape.length - 1; axis >= 0; axis--) {
    if (shape[axis]! > 1 && strides[axis] !== step) throw payloadError('a tensor in it is not contiguous')
    step *= Math.max(1, shape[axis]!)
  }
  const from = toSize(start, 'its storage offset') * itemBytes
  if (from + elements * itemBytes > data.length) {
    throw payloadError(`a tensor in it ends at byte ${from + elements * itemBytes} of a storage of ${data.length}`)
  }
  return { dtype, shape, data: data.subarray(from, from + elements * itemBytes) }
}

/** ("storage", class, key, location, elements) */
function readStorage (
  value: PickleValue | undefined,
  find: (key: string) => Uint8Array | undefined
): { dtype: string, data: Uint8Array } {
  const id = value instanceof PickleObject && value.name === STORAGE ? value.args[0] : undefined
  if (!Array.isArray(id) || id.length !== 5 || id[0] !== 'storage') {
    throw payloadError(`${describePickle(value)} where a storage was expected`)
  }
  const [, kind, key, , count] = id
  const dtype = kind instanceof PickleName ? torchStorageDType(kind.name) : undefined
  if (dtype === undefined || typeof key !== 'string') {
    throw payloadError(`${describePickle(kind)} where the class of a storage was expected`)
  }
  const data = find(key)
  if (data === undefined || data.length !== toSize(count, 'a storage') * torchItemBytes(dtype)!) {
    throw payloadError('a storage in it is not there, or not of the length that it should be')
  }
  return { dtype, data }
}
