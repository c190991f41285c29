import type { MeasuredTensor } from '../measure-tensors.ts'

/** How a trainer packs announced tensors into broadcasts. */
export type Packing =
  /** One broadcast for each tensor. */
  | 'each'
  /** All of them in one, one after another without gaps. */
  | 'whole'
  /** Consecutive tensors of one dtype in one broadcast, without gaps (prime-rl, transports/weights/nccl.py). */
  | 'dtype'
  /**
   * Consecutive tensors in one broadcast, without gaps. It is closed after the tensor at which its bytes exceed
   * `bufferBytes` (vLLM, packed_tensor.py).
   */
  | { bufferBytes: number }

export interface Broadcasts {
  /** Bytes of each broadcast. */
  sizes: number[]
  /** Index of each broadcast's first tensor, and one more than that of its last. */
  spans: ReadonlyArray<readonly [first: number, end: number]>
}

/** Returns no broadcasts for no tensors. */
export function cutBroadcasts (tensors: readonly MeasuredTensor[], packing: Packing): Broadcasts {
  const limit = packing === 'each' ? -1 : typeof packing === 'object' ? packing.bufferBytes : Infinity
  const sizes: number[] = []
  const spans: Array<readonly [number, number]> = []
  let first = 0
  let sum = 0
  for (const [index, { bytes, dtype }] of tensors.entries()) {
    sum += bytes
    const next = tensors[index + 1]
    if (next !== undefined && sum <= limit && (packing !== 'dtype' || next.dtype === dtype)) continue
    sizes.push(sum)
    spans.push([first, index + 1])
    first = index + 1
    sum = 0
  }
  return { sizes, spans }
}

/** The position of each tensor in a stream whose broadcasts begin at `offsets`. */
export function placeTensors (
  tensors: readonly MeasuredTensor[],
  { spans }: Broadcasts,
  offsets: readonly number[]
): number[] {
  const at: number[] = []
  for (const [index, [first, end]] of spans.entries()) {
    let next = offsets[index]!
    for (const { bytes } of tensors.slice(first, end)) {
      at.push(next)
      next += bytes
    }
  }
  return at
}
