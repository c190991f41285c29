import { PickleDict } from '../pickle/values.ts'
import type { PickleValue } from '../pickle/values.ts'
import { payloadError } from './tensor.ts'

// One tensor on several GPUs: vLLM's senders gather the handles of all training ranks into {UUID of the GPU: handle},
// and each rank of the engine takes the one of its own GPU.

const UUID = /^(?:gpu-|mig-)?([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})$/

/** The UUID of a GPU in lower case, without `GPU-` or `MIG-`; undefined for other text. */
export function toGpuUuid (text: string): string | undefined {
  return UUID.exec(text.toLowerCase())?.[1]
}

/**
 * The handles of a dict by GPU; null for other dicts. Cached, because every tensor of a request may contain the same
 * dict.
 */
const known = new WeakMap<PickleDict, ReadonlyMap<string, PickleValue> | null>()

function byGpu (dict: PickleDict): ReadonlyMap<string, PickleValue> | null {
  let handles = known.get(dict)
  if (handles === undefined) known.set(dict, handles = readGpus(dict))
  return handles
}

function readGpus ({ keys, values }: PickleDict): ReadonlyMap<string, PickleValue> | null {
  const handles = new Map<string, PickleValue>()
  for (const [index, key] of keys.entries()) {
    const gpu = typeof key === 'string' ? toGpuUuid(key) : undefined
    if (gpu === undefined) return null
    handles.set(gpu, values[index]!)
  }
  return handles.size === 0 ? null : handles
}

/** A dict that is not empty and has only UUIDs for keys. Call it when the whole pickle has been read. */
export function isGpuDict (value: PickleValue | undefined): value is PickleDict {
  return value instanceof PickleDict && byGpu(value) !== null
}

/**
 * The handle for the rank that has `gpu`: the one of its GPU; or the only one, which is read over NVLink if another GPU
 * has it; or, for an engine without GPUs, the first. Throws TENSOR_PAYLOAD if there are only other GPUs.
 */
export function pickGpu (dict: PickleDict, gpu: string | undefined): { device: string, handle: PickleValue } {
  if (dict.size === 1 || gpu === undefined) {
    return {
      device: toGpuUuid(dict.keys[0] as string)!,
      handle: dict.values[0]!
    }
  }
  const handles = byGpu(dict)!
  const handle = handles.get(gpu)
  if (handle === undefined) {
    throw payloadError(`it is offered on the GPUs ${
      [...handles.keys()]
        .slice(0, 16)
        .join(', ')
    }, and this rank has ${gpu}: sender and server must run on the same ones`)
  }
  return { device: gpu, handle }
}
