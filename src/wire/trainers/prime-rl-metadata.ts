import { RefitError } from '../../errors.ts'
import { readPickle } from '../pickle/read.ts'
import type { PickleNames } from '../pickle/read.ts'
import { describePickle, PickleDict, PickleList, PickleName } from '../pickle/values.ts'
import type { PickleValue } from '../pickle/values.ts'
import { TORCH_DTYPES } from '../torch/dtypes.ts'
import { torchNames } from '../torch/names.ts'

/**
 * The metadata that prime-rl sends before a state dict: tensors in the order in which they are sent, grouped by dtype.
 */
export interface StateDictMetadata {
  names: string[]
  dtypes: string[]
  shapes: number[][]
}

const names: PickleNames = (module, name) =>
  module === 'torch' && (name === 'Size' || TORCH_DTYPES.includes(name)) ? torchNames(module, name) : undefined

/**
 * Reads `{dtype: [(name, shape, numel)]}` (prime-rl, transports/weights/nccl.py) as data. Throws PICKLE_* and
 * TENSOR_PAYLOAD.
 */
export function readStateDictMetadata (bytes: Uint8Array): StateDictMetadata {
  const root = readPickle(bytes, names)
  if (!(root instanceof PickleDict)) throw unread(root, 'a dict of dtypes')
  const all: StateDictMetadata = { names: [], dtypes: [], shapes: [] }
  for (const [index, dtype] of root.keys.entries()) {
    if (!(dtype instanceof PickleName) || dtype.role !== 'dtype') throw unread(dtype, 'a dtype of torch')
    const list = root.values[index]!
    if (!(list instanceof PickleList)) throw unread(list, 'a list of tensors')
    for (const item of list.items) {
      const [name, shape, count] = Array.isArray(item) ? item : []
      if (typeof name !== 'string' || !Array.isArray(shape) || !shape.every(isSize) || !isSize(count)) {
        throw unread(item, "a tensor's name, shape and number of elements")
      }
      if (shape.reduce((product, size) => product * size, 1) !== count) {
        throw new RefitError(
          'TENSOR_PAYLOAD',
          `tensor "${name.slice(0, 200)}" of the metadata: shape [${shape.join(', ')}] has not ${count} elements`
        )
      }
      all.names.push(name)
      all.dtypes.push(dtype.name)
      all.shapes.push(shape)
    }
  }
  return all
}

function isSize (value: PickleValue | undefined): value is number {
  return typeof value === 'number' && Number.isSafeInteger(value) && value >= 0
}

function unread (value: PickleValue, expected: string): RefitError {
  return new RefitError(
    'TENSOR_PAYLOAD',
    `the metadata of a state dict: expected ${expected}, got ${describePickle(value)}`
  )
}
