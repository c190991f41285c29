import { describePickle, PickleDict } from '../pickle/values.ts'
import type { PickleValue } from '../pickle/values.ts'
import { readPickle } from '../pickle/read.ts'
import { salvageNames } from '../torch/names.ts'
import { payloadError } from '../torch/tensor.ts'

// The messages of verl's worker to vLLM's (verl, vllm_rollout/bucketed_weight_transfer.py): first the handle of a
// buffer, or a name in POSIX shared memory, then {"bucket_meta": {name: its place}, "is_last"}. A tensor that is larger
// than the buffer comes as a handle of its own.

/** A whole buffer in shared memory, made without torch. */
export interface NamedMemory {
  name: string
  bytes: number
}

const MEMORY = /^verl_weights_[0-9a-f]{32}$/

/** Reads the first message; null if it is a handle. Throws PICKLE_* and TENSOR_PAYLOAD. */
export function readNamedMemory (bytes: Uint8Array): NamedMemory | null {
  const root = readPickle(bytes, salvageNames)
  if (!(root instanceof PickleDict) || root.get('size') === undefined) return null
  const name = root.get('name')
  const size = root.get('size')
  if (typeof name !== 'string' || !MEMORY.test(name)) {
    throw payloadError(`the name of its shared memory is ${describePickle(name)} that verl does not give`)
  }
  if (typeof size !== 'number' || size <= 0) {
    throw payloadError(`the size of its shared memory is ${describePickle(size)}`)
  }
  return { name, bytes: size }
}

/** The metadata of a bucket, as a list; null for other messages. */
export function bucketMeta (root: PickleValue): { entries: PickleValue[], isLast: boolean } | null {
  const meta = root instanceof PickleDict ? root.get('bucket_meta') : undefined
  if (!(root instanceof PickleDict) || !(meta instanceof PickleDict)) return null
  return { entries: meta.values, isLast: root.get('is_last') === true }
}

/** The handle of a tensor that comes alone; undefined for a bucket. */
export function directHandle (root: PickleValue): PickleValue | undefined {
  const [entry, ...others] = bucketMeta(root)?.entries ?? []
  return others.length === 0 && entry instanceof PickleDict ? entry.get('handle') ?? undefined : undefined
}
