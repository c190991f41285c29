import { PickleDict } from '../pickle/values.ts'
import type { TensorRequestBody } from '../torch/body.ts'
import { toGpuUuid } from '../torch/gpus.ts'
import { readNested } from '../torch/payload.ts'
import { readTensor } from '../torch/rebuild.ts'
import { StorageTable } from '../torch/storage.ts'
import { directHandle } from './verl-buckets.ts'

/**
 * Reads a pickle of one tensor's handle: (function, arguments), as torch's reduce_tensor returns it, or verl's metadata
 * with one in it. `gpu`: the UUID of the GPU that it lies on, because the index in it counts the GPUs that the sender
 * sees. Throws PICKLE_*, TENSOR_PAYLOAD or UNSUPPORTED.
 */
export function readHandle (name: string, bytes: Uint8Array, gpu?: string): TensorRequestBody {
  const pickled = readNested(bytes)
  const root = directHandle(pickled) ?? pickled
  const uuid = gpu === undefined ? undefined : toGpuUuid(gpu)
  const storages = new StorageTable()
  const byGpu = new PickleDict()
  byGpu.keys.push(uuid ?? null)
  byGpu.values.push(root)
  const tensor = readTensor(name, uuid === undefined ? root : byGpu, storages, uuid)
  return { ranks: [[tensor]], storages: storages.list, spares: [] }
}
