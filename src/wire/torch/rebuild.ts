import { describePickle, PickleName, PickleObject } from '../pickle/values.ts'
import type { PickleTuple, PickleValue } from '../pickle/values.ts'
import { isGpuDict, pickGpu, toGpuUuid } from './gpus.ts'
import { torchItemBytes, torchStorageDType } from './dtypes.ts'
import { checkExtent } from './extent.ts'
import { checkCount, checkRole, toBoolean, toSize, toSizes, toTorchDType } from './fields.ts'
import { readTypedStorage } from './storage.ts'
import type { StorageTable } from './storage.ts'
import { payloadError } from './tensor.ts'
import type { TensorDescriptor, TensorStorage } from './tensor.ts'
import { nameTensor } from './tensor-name.ts'

const CUDA_ARGS = 15

/**
 * Reads a tensor as torch.multiprocessing's reducers wrote it: a call, a bare tuple of (function, arguments), or a dict
 * of these by GPU, of which `gpu` is the reader's. Throws TENSOR_PAYLOAD, with the tensor's name.
 */
export function readTensor (
  name: string,
  value: PickleValue | undefined,
  storages: StorageTable,
  gpu?: string
): TensorDescriptor {
  try {
    if (!isGpuDict(value)) return readHandle(name, value, storages)
    if (value.size > 1) storages.offers.add(value)
    const { device, handle } = pickGpu(value, gpu)
    return readHandle(name, handle, storages, device)
  } catch (error) {
    throw nameTensor(error, name)
  }
}

/** True if ranks may take different handles of it. */
export function isOffer (value: PickleValue | undefined): boolean {
  return isGpuDict(value) && value.size > 1
}

/**
 * The storages that were offered on GPUs that no rank has: to be released, and not to be opened. Removes them from the
 * list of storages. Call it after the last tensor has been read.
 */
export function takeSpares (storages: StorageTable): TensorStorage[] {
  const used = storages.list.length
  for (const { keys, values } of storages.offers) {
    for (const [index, handle] of values.entries()) {
      try {
        readHandle('', handle, storages, toGpuUuid(keys[index] as string))
      } catch {}
    }
  }
  return storages.list.splice(used)
}

/** `gpu`: the UUID that is the handle's key, for newer versions of vLLM, which leave out the function. */
function readHandle (
  name: string,
  value: PickleValue | undefined,
  storages: StorageTable,
  gpu?: string
): TensorDescriptor {
  if (value instanceof PickleObject) return rebuild(name, value.name, value.args, storages, gpu)
  if (Array.isArray(value) && value.length === 2 && value[0] instanceof PickleName && Array.isArray(value[1])) {
    return rebuild(name, value[0], value[1], storages, gpu)
  }
  if (gpu !== undefined && isCudaArgs(value)) return rebuildCuda(name, value, storages, gpu)
  throw payloadError(`${describePickle(value)} where a tensor was expected`)
}

/** True for the arguments of rebuild_cuda_tensor without the function. */
export function isCudaArgs (value: PickleValue | undefined): value is PickleTuple {
  return Array.isArray(value) && value.length === CUDA_ARGS && value[0] instanceof PickleName &&
    value[0].role === 'tensor class'
}

function rebuild (
  tensor: string,
  name: PickleName,
  args: PickleTuple,
  storages: StorageTable,
  gpu?: string
): TensorDescriptor {
  switch (name.role) {
    case 'rebuild_cuda_tensor':
      return rebuildCuda(tensor, args, storages, gpu)
    case 'rebuild_tensor':
      return rebuildCpu(tensor, args, storages)
    case 'rebuild_meta_tensor':
      throw payloadError('a tensor on the meta device, which has no data')
    default:
      throw payloadError(`a ${name.name} where a tensor was expected`)
  }
}

function rebuildCuda (name: string, args: PickleTuple, storages: StorageTable, gpu?: string): TensorDescriptor {
  checkCount(args, 'rebuild_cuda_tensor', CUDA_ARGS)
  checkRole(args[0], 'its class', 'tensor class')
  checkRole(args[4], 'the class of its storage', 'storage class', 'legacy storage class')
  toBoolean(args[10], 'requires_grad')
  return view(name, toTorchDType(args[5]), args[1], args[2], args[3], storages.cuda(args, gpu))
}

function rebuildCpu (name: string, args: PickleTuple, storages: StorageTable): TensorDescriptor {
  checkCount(args, 'rebuild_tensor', 3)
  checkRole(args[0], 'its class', 'tensor class')
  const { storage, dtype } = readTypedStorage(args[1])
  const metadata = args[2]
  if (!Array.isArray(metadata) || metadata.length !== 4) {
    throw payloadError(`its metadata is ${describePickle(metadata)}, not a tuple of 4`)
  }
  toBoolean(metadata[3], 'requires_grad')
  const legacy = dtype instanceof PickleName ? torchStorageDType(dtype.name) : undefined
  return view(name, legacy ?? toTorchDType(dtype), metadata[1], metadata[2], metadata[0], storages.cpu(storage))
}

function view (
  name: string,
  dtype: string,
  size: PickleValue | undefined,
  strides: PickleValue | undefined,
  start: PickleValue | undefined,
  storage: TensorDescriptor['storage']
): TensorDescriptor {
  const itemBytes = torchItemBytes(dtype)!
  const shape = toSizes(size, 'its shape')
  const stride = toSizes(strides, 'its stride')
  const offset = toSize(start, 'its storage offset') * itemBytes
  checkExtent(shape, stride, itemBytes, offset, storage.bytes)
  return { name, dtype, shape, stride, offset, storage }
}
