import type { StridedMatrix } from '../../contract/weight-source.ts'
import { torchItemBytes } from './dtypes.ts'
import { countElements } from './extent.ts'
import { payloadError } from './tensor.ts'
import type { TensorDescriptor } from './tensor.ts'

const MAX_MATRICES = 4096

/**
 * The tensor in the form that the plan uses ([n] is [n, 1], [..., c] is [rows, c]): one matrix if its rows have one
 * distance (contiguous, transposed, sliced), else several, in the order of their rows. A tensor without elements has
 * none. Throws TENSOR_PAYLOAD for a tensor that is expanded (stride 0) or in more than 4096 pieces; the message advises
 * to send it contiguous.
 */
export function asMatrices ({ name, dtype, shape, stride, offset }: TensorDescriptor): StridedMatrix[] {
  if (countElements(shape, name) === 0) return []
  const itemBytes = torchItemBytes(dtype)!
  if (shape.some((size, axis) => size > 1 && stride[axis] === 0)) {
    throw payloadError('it is expanded (a stride is 0); send it contiguous()', name)
  }
  const wide = shape.length > 1
  const cols = wide ? shape.at(-1)! : 1
  const colBytes = cols > 1 ? stride.at(-1)! * itemBytes : itemBytes
  const groups = mergeAxes(wide ? shape.slice(0, -1) : shape, stride)
  const { size: rows, step } = groups.pop() ?? { size: 1, step: cols }
  const starts = startsOf(groups, name)
  return starts.map((start, index) => ({
    firstRow: index * rows,
    rows,
    cols,
    offset: offset + start * itemBytes,
    rowBytes: step * itemBytes,
    colBytes
  }))
}

/** Merges neighbouring axes that are one axis in memory, outermost first. Axes of 1 are left out. */
function mergeAxes (shape: readonly number[], stride: readonly number[]): Array<{ size: number, step: number }> {
  const groups: Array<{ size: number, step: number }> = []
  for (const [axis, size] of shape.entries()) {
    const step = stride[axis]!
    const outer = groups.at(-1)
    if (size === 1) continue
    if (outer !== undefined && outer.step === size * step) groups[groups.length - 1] = { size: outer.size * size, step }
    else groups.push({ size, step })
  }
  return groups
}

/** Elements from the first to the start of each combination of the outer axes. */
function startsOf (groups: ReadonlyArray<{ size: number, step: number }>, name: string): number[] {
  let starts = [0]
  for (const { size, step } of groups) {
    if (starts.length * size > MAX_MATRICES) {
      throw payloadError(`its strides tear it into more than ${MAX_MATRICES} matrices; send it contiguous()`, name)
    }
    starts = starts.flatMap(start => Array.from({ length: size }, (_, i) => start + i * step))
  }
  return starts
}
