import { PickleDict } from '../pickle/values.ts'
import type { TensorRequestBody } from './body.ts'
import { toGpuUuid } from './gpus.ts'
import { readNested } from './payload.ts'
import { readTensor } from './rebuild.ts'
import { StorageTable } from './storage.ts'
import { directHandle } from '../trainers/verl-buckets.ts'

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
