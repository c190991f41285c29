import { contiguous } from '../../wire/torch/bucket.ts'
import { describeUnreadDType, torchItemBytes } from '../../wire/torch/dtypes.ts'
import { checkExtent, countElements } from '../../wire/torch/extent.ts'
import { payloadError } from '../../wire/torch/tensor.ts'
import type { TensorDescriptor } from '../../wire/torch/tensor.ts'

export interface ViewOptions {
  /** torch's name; default this tensor's own. */
  dtype?: string
  shape?: readonly number[]
  /** In elements; default row-major, or this tensor's own strides if no shape is given either. */
  stride?: readonly number[]
  /** Bytes from this tensor's first element to the view's; default 0. */
  offset?: number
}

/** A trainer's tensor as a custom loader sees it: its description and its place, not its bytes. */
export class LoaderTensor {
  readonly name: string
  /** torch's name. */
  readonly dtype: string
  readonly shape: readonly number[]
  /** In elements. */
  readonly stride: readonly number[]
  /** One for each rank, in their order; all have the same shape, dtype and strides. */
  readonly #ranks: readonly TensorDescriptor[]

  constructor (ranks: readonly TensorDescriptor[]) {
    const { name, dtype, shape, stride } = ranks[0]!
    this.name = name
    this.dtype = dtype
    this.shape = Object.freeze([...shape])
    this.stride = Object.freeze([...stride])
    this.#ranks = ranks
    const looks = ({ dtype, shape, stride }: TensorDescriptor): string =>
      `${dtype} [${shape.join(', ')}] with strides [${stride.join(', ')}]`
    const other = ranks.find(tensor => looks(tensor) !== looks(ranks[0]!))
    if (other !== undefined) {
      throw payloadError(`ranks are offered different ones: ${looks(ranks[0]!)} and ${looks(other)}`, name)
    }
  }

  /** Bytes of one element. */
  get itemBytes (): number {
    return torchItemBytes(this.dtype)!
  }

  /** Its place for each rank. */
  static ranksOf (tensor: LoaderTensor): readonly TensorDescriptor[] {
    return tensor.#ranks
  }

  /** Other elements of the same memory. Throws TENSOR_PAYLOAD if they would lie outside it. */
  view (options: ViewOptions = {}): LoaderTensor {
    const dtype = options.dtype ?? this.dtype
    const itemBytes = torchItemBytes(dtype)
    if (itemBytes === undefined) throw payloadError(describeUnreadDType(String(dtype)), this.name)
    const shape = this.#sizes(options.shape ?? this.shape, 'shape')
    const stride = options.stride === undefined && options.shape !== undefined
      ? contiguous(shape)
      : this.#sizes(options.stride ?? this.stride, 'stride')
    const shift = options.offset ?? 0
    if (!Number.isSafeInteger(shift)) {
      throw payloadError(
        `the offset of a view is ${String(shift)}, not a whole number of bytes`,
        this.name
      )
    }
    return new LoaderTensor(this.#ranks.map(tensor => {
      const offset = tensor.offset + shift
      if (offset < 0) throw payloadError(`a view begins ${-offset} bytes before its storage`, this.name)
      checkExtent(shape, stride, itemBytes, offset, tensor.storage.bytes, this.name)
      return { ...tensor, dtype, shape, stride, offset }
    }))
  }

  /** Elements `start` (included) to `end` (excluded) of an axis. Throws TENSOR_PAYLOAD. */
  slice (axis: number, start: number, end: number): LoaderTensor {
    const size = this.shape[axis]
    if (
      size === undefined || !Number.isSafeInteger(start) || !Number.isSafeInteger(end) || start < 0 || start > end ||
      end > size
    ) {
      throw payloadError(
        `there is no slice ${start}:${end} of axis ${axis} of shape [${this.shape.join(', ')}]`,
        this.name
      )
    }
    const shape = this.shape.with(axis, end - start)
    return this.view({
      shape,
      stride: this.stride,
      offset: countElements(shape) === 0 ? 0 : start * this.stride[axis]! * torchItemBytes(this.dtype)!
    })
  }

  #sizes (value: unknown, what: string): number[] {
    if (Array.isArray(value) && value.every(size => Number.isSafeInteger(size) && size >= 0)) {
      return [...value] as number[]
    }
    throw payloadError(`the ${what} of a view is not a list of whole numbers from 0 up`, this.name)
  }
}
