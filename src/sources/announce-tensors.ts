import { bytesOf } from '../native/dtypes.ts'
import { torchWeightDType } from '../wire/torch/dtypes.ts'
import { asMatrices } from '../wire/torch/matrix.ts'
import { payloadError, SHARED_FILE_HEADER } from '../wire/torch/tensor.ts'
import type { TensorDescriptor, TensorStorage } from '../wire/torch/tensor.ts'
import type { AnnouncedTensor, StridedMatrix } from '../contract/weight-source.ts'

/**
 * The most matrices of one request, not counting the first of each tensor. One tensor may be cut into thousands of
 * matrices, and a list may repeat it.
 */
const MAX_MORE = 500_000

/**
 * The tensors of all ranks, as a source announces them. A tensor that several ranks have in common is announced once.
 * `fileOf` gives the file of the source in which a storage lies. Throws TENSOR_PAYLOAD, with the tensor's name, for
 * strides that cannot be copied.
 */
export function announceTensors (
  ranks: readonly TensorDescriptor[][],
  fileOf: ReadonlyMap<TensorStorage, number>
): AnnouncedTensor[] {
  const lists = groupEqual(ranks)
  let left = MAX_MORE
  const announced = (tensor: TensorDescriptor): AnnouncedTensor => {
    const one = announce(tensor, fileOf)
    left -= (one.parts?.length ?? 1) - 1
    if (left < 0) {
      throw payloadError(
        `with its own, the strides of this request tear its tensors into more than ${MAX_MORE} matrices; ` +
          'send them contiguous()',
        tensor.name
      )
    }
    return one
  }
  // All ranks have the same tensors: the usual case.
  if (lists.length === 1) return lists[0]!.tensors.map(announced)
  const first = lists[0]!
  const sharers = first.tensors.map(() => [...first.ranks])
  const apart: AnnouncedTensor[] = []
  for (const { tensors, ranks: own } of lists.slice(1)) {
    for (const [index, tensor] of tensors.entries()) {
      const twin = first.tensors[index]
      if (twin !== undefined && sameTensor(twin, tensor)) sharers[index]!.push(...own)
      else apart.push({ ...announced(tensor), ranks: own })
    }
  }
  const shared = first.tensors.map((tensor, index) => ({ ...announced(tensor), ranks: sharers[index]! }))
  return [...shared, ...apart]
}

/** Ranks with the same tensors share one array. */
function groupEqual (ranks: readonly TensorDescriptor[][]): Array<{ tensors: TensorDescriptor[], ranks: number[] }> {
  const groups = new Map<TensorDescriptor[], number[]>()
  for (const [rank, tensors] of ranks.entries()) {
    const group = groups.get(tensors)
    if (group === undefined) groups.set(tensors, [rank])
    else group.push(rank)
  }
  return [...groups].map(([tensors, own]) => ({ tensors, ranks: own }))
}

function sameTensor (a: TensorDescriptor, b: TensorDescriptor): boolean {
  return a.name === b.name && a.storage === b.storage && a.offset === b.offset && a.dtype === b.dtype && sameNumbers(
    a.shape,
    b.shape
  ) && sameNumbers(a.stride, b.stride)
}

function sameNumbers (a: readonly number[], b: readonly number[]): boolean {
  return a.length === b.length && a.every((value, index) => value === b[index])
}

function announce (tensor: TensorDescriptor, fileOf: ReadonlyMap<TensorStorage, number>): AnnouncedTensor {
  const { name, shape, storage } = tensor
  const dtype = torchWeightDType(tensor.dtype)!
  const start = startOf(storage)
  const matrices = asMatrices(tensor).map(matrix => ({ ...matrix, offset: matrix.offset + start }))
  const itemBytes = bytesOf(dtype)
  for (const { rows, cols, rowBytes, colBytes } of matrices) {
    if (rows > 1 && colBytes === itemBytes && rowBytes < cols * itemBytes) {
      throw payloadError('its rows overlap; send it contiguous()', name)
    }
  }
  const announced = { name, dtype, shape, source: fileOf.get(storage) ?? 0, offset: matrices[0]?.offset ?? 0 }
  return matrices.length === 1 && isPacked(matrices[0]!, itemBytes) ? announced : { ...announced, parts: matrices }
}

/** The byte of its source at which a storage starts. */
export function startOf (storage: TensorStorage): number {
  return storage.kind === 'shared-file' ? SHARED_FILE_HEADER : storage.kind === 'cuda' ? storage.offset : 0
}

function isPacked ({ rows, cols, rowBytes, colBytes }: StridedMatrix, itemBytes: number): boolean {
  return colBytes === itemBytes && (rows === 1 || rowBytes === cols * itemBytes)
}
