import type { AnnouncedTensor } from '../../contract/weight-source.ts'
import { RefitError } from '../../errors.ts'
import { describeUnreadDType, torchWeightDType } from '../../wire/torch/dtypes.ts'
import type { MeasuredTensor } from '../measure-tensors.ts'

/** `at`: the offset of each tensor in the stream. All dtypes are weights'. */
export function announcedTensors (tensors: readonly MeasuredTensor[], at: readonly number[]): AnnouncedTensor[] {
  return tensors.map(({ name, dtype, shape }, index) => ({
    name,
    dtype: torchWeightDType(dtype)!,
    shape,
    source: 0,
    offset: at[index]!
  }))
}

/** Throws TENSOR_PAYLOAD for a dtype that no weight has. */
export function requireWeights (tensors: readonly MeasuredTensor[]): void {
  const unread = tensors.find(({ dtype }) => torchWeightDType(dtype) === undefined)
  if (unread !== undefined) {
    throw new RefitError(
      'TENSOR_PAYLOAD',
      `tensor "${unread.name}": ${describeUnreadDType(unread.dtype)}`,
      { param: unread.name }
    )
  }
}
