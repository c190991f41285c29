import { payloadError } from './tensor.ts'

// torch's own limit.
const MAX_DIMS = 64

/** Elements of a shape. Throws TENSOR_PAYLOAD for more than 2^53 elements, or more dimensions than tensors have. */
export function countElements (shape: readonly number[], tensor?: string): number {
  if (shape.length > MAX_DIMS) throw payloadError(`${shape.length} dimensions (at most ${MAX_DIMS})`, tensor)
  let count = 1
  let empty = false
  for (const size of shape) {
    if (size === 0) empty = true
    else count *= size
    if (count > Number.MAX_SAFE_INTEGER) throw payloadError(`shape [${shape.join(', ')}] is too big`, tensor)
  }
  return empty ? 0 : count
}

/**
 * Checks that all elements lie inside a storage: the first one `offset` bytes into it, the others by `stride`
 * (elements). An empty tensor always passes. Throws TENSOR_PAYLOAD.
 */
export function checkExtent (
  shape: readonly number[],
  stride: readonly number[],
  itemBytes: number,
  offset: number,
  storageBytes: number,
  tensor?: string
): void {
  const elements = countElements(shape, tensor)
  if (stride.length !== shape.length) {
    throw payloadError(`${shape.length} dimensions and ${stride.length} strides`, tensor)
  }
  if (elements === 0) return
  let last = 0
  for (let axis = 0; axis < shape.length; axis++) {
    last += (shape[axis]! - 1) * stride[axis]!
    // A sum that is rounded is already beyond any storage.
    if (last > Number.MAX_SAFE_INTEGER) break
  }
  const end = offset + (last + 1) * itemBytes
  if (end > storageBytes) {
    throw payloadError(
      `shape [${shape.join(', ')}] with strides [${
        stride.join(', ')
      }] from byte ${offset} on ends at byte ${end}, but its storage has ${storageBytes}`,
      tensor
    )
  }
}
