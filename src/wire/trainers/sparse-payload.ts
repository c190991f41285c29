import type { DType } from '../../native/dtypes.ts'
import { PickleDict, PickleList } from '../pickle/values.ts'
import { countElements } from '../torch/extent.ts'
import { describeUnreadDType, torchItemBytes, torchWeightDType } from '../torch/dtypes.ts'
import { toSize, toSizes } from '../torch/fields.ts'
import { readTorchFile } from '../torch/file.ts'
import type { FileTensor } from '../torch/file.ts'
import { payloadError } from '../torch/tensor.ts'

// The payload of NeMo-RL's sparse refit (nemo_rl/utils/weight_transfer_sparse_codec.py): (positions, values by dtype,
// [item]). The values are bits, as integers of the tensor's width. Positions are a range, or the gaps between them.

/** Changes of one tensor. */
export interface SparseItem {
  name: string
  dtype: DType
  shape: number[]
  operation: 'xor' | 'overwrite'
  /** A range begins with element `first`, and has no bytes; gaps are integers of 16, 32 or 64 bits. */
  encoding: 'range' | 'gap16' | 'gap32' | 'gap64'
  positions: Uint8Array
  first: number
  values: Uint8Array
}

const GAPS: Readonly<Record<number, SparseItem['encoding']>> = { 2: 'gap16', 4: 'gap32', 8: 'gap64' }
/** torch's names of integers by their width. */
const INTEGERS: Readonly<Record<number, string>> = { 2: 'int16', 4: 'int32' }

/** The result holds views of `bytes`. Throws PICKLE_* and TENSOR_PAYLOAD. */
export function readSparsePayload (bytes: Uint8Array): SparseItem[] {
  const { root, tensor } = readTorchFile(bytes)
  if (!Array.isArray(root) || root.length !== 3 || !Array.isArray(root[1]) || !(root[2] instanceof PickleList)) {
    throw payloadError('a sparse payload is a tuple of positions, values and a list of items')
  }
  const positions = tensor(root[0])
  if (positions.dtype !== 'uint8') throw payloadError(`its positions are of ${positions.dtype}, expected uint8`)
  const groups = root[1].map(tensor)
  return root[2].items.map((item, index) => {
    if (!(item instanceof PickleDict)) throw payloadError(`item ${index} is no dict`)
    return readItem(item, index, positions, groups)
  })
}

function readItem (item: PickleDict, index: number, positions: FileTensor, groups: readonly FileTensor[]): SparseItem {
  const name = item.get('name')
  if (typeof name !== 'string') throw payloadError(`item ${index} has no name`)
  const dtypeName = item.get('dtype')
  const dtype = torchWeightDType(String(dtypeName))
  if (dtype === undefined) throw payloadError(describeUnreadDType(String(dtypeName)), name)
  const operation = item.get('operation')
  if (operation !== 'xor' && operation !== 'overwrite') {
    throw payloadError(`operation is ${String(operation).slice(0, 40)}, expected "xor" or "overwrite"`, name)
  }
  const shape = toSizes(item.get('shape'), 'its shape')
  countElements(shape, name)
  const values = valuesOf(item, name, dtype, groups)
  const count = values.length / torchItemBytes(dtype)!
  return { name, dtype, shape, operation, ...where(item, name, count, positions.data), values }
}

function valuesOf (item: PickleDict, name: string, dtype: DType, groups: readonly FileTensor[]): Uint8Array {
  const group = groups[toSize(item.get('value_group'), 'value_group')]
  const width = torchItemBytes(dtype)!
  if (group === undefined || group.dtype !== INTEGERS[width]) {
    throw payloadError(`its values are of ${group?.dtype ?? 'no group'}, expected ${INTEGERS[width]}`, name)
  }
  const [from, to] = [toSize(item.get('value_start'), 'value_start'), toSize(item.get('value_end'), 'value_end')]
  if (from >= to || to > group.shape[0]!) {
    throw payloadError(`its values are ${from} to ${to} of ${group.shape[0]!}`, name)
  }
  return group.data.subarray(from * width, to * width)
}

function where (
  item: PickleDict,
  name: string,
  count: number,
  positions: Uint8Array
): Pick<SparseItem, 'encoding' | 'positions' | 'first'> {
  const encoding = item.get('index_encoding')
  if (encoding === 'range') {
    return {
      encoding: 'range',
      positions: new Uint8Array(0),
      first: toSize(item.get('range_start'), 'range_start')
    }
  }
  if (encoding !== 'deltas') {
    throw payloadError(`index_encoding is ${String(encoding).slice(0, 40)}, expected "range" or "deltas"`, name)
  }
  const [from, to] = [toSize(item.get('index_start'), 'index_start'), toSize(item.get('index_end'), 'index_end')]
  const width = (to - from) / count
  if (from > to || to > positions.length || GAPS[width] === undefined) {
    throw payloadError(`it has bytes ${from} to ${to} of ${positions.length} as the positions of ${count} values`, name)
  }
  return { encoding: GAPS[width], positions: positions.subarray(from, to), first: 0 }
}
