import type { RefitError } from '../errors.ts'
import { describePickle, PickleBytes, PickleDict, PickleList, PickleObject } from './pickle-values.ts'
import type { PickleValue } from './pickle-values.ts'
import { readNested } from './torch-payload.ts'
import { readTensor } from './torch-rebuild.ts'
import type { StorageTable } from './torch-storage.ts'
import { payloadError } from './torch-tensor.ts'
import type { TensorDescriptor } from './torch-tensor.ts'
import { checkTensorCount, nameTensor, toTensorName } from './torch-tensor-name.ts'

// A list of (name, tensor); verl's tensors are LocalSerializedTensors, which hold a pickle of its own for every rank.

/** What one entry brings to each rank. */
export class NamedTensors {
  readonly #pairs: Array<[name: PickleValue, tensor: PickleValue]>
  readonly #storages: StorageTable
  /** By the bytes that were read: what stands in several places is read once. */
  readonly #nested = new Map<PickleBytes, TensorDescriptor>()
  /** True where ranks get different tensors. */
  readonly perRank: boolean

  constructor (root: PickleValue, storages: StorageTable) {
    this.#pairs = toPairs(root)
    this.#storages = storages
    this.perRank = this.#pairs.some(pair => isLocal(pair[1]))
  }

  /** Throws TENSOR_PAYLOAD, UNSUPPORTED and, for tensors in pickles of their own, PICKLE_*. */
  forRank (rank: number): TensorDescriptor[] {
    return this.#pairs.map(pair => {
      const name = toTensorName(pair[0])
      const value = pair[1]
      if (!isLocal(value)) return readTensor(name, value, this.#storages)
      try {
        return this.#local(name, value as PickleObject, rank)
      } catch (error) {
        throw nameTensor(error, name)
      }
    })
  }

  #local (name: string, value: PickleObject, rank: number): TensorDescriptor {
    const values = value.state?.get('values')
    if (!(values instanceof PickleList)) throw payloadError(`a LocalSerializedTensor with ${describePickle(values)} for values`)
    const mine = values.items[values.items.length === 1 ? 0 : rank]
    if (mine === undefined) throw payloadError(`a LocalSerializedTensor has values for ${values.items.length} ranks, and this is rank ${rank}`)
    if (!(mine instanceof PickleBytes)) throw payloadError(`a LocalSerializedTensor holds ${describePickle(mine)}, not bytes`)
    const known = this.#nested.get(mine)
    if (known !== undefined) return { ...known, name }
    const tensor = readTensor(name, readNested(mine.view()), this.#storages)
    this.#nested.set(mine, tensor)
    return tensor
  }
}

function isLocal (value: PickleValue | undefined): boolean {
  return value instanceof PickleObject && value.name.role === 'LocalSerializedTensor'
}

function toPairs (root: PickleValue): Array<[name: PickleValue, tensor: PickleValue]> {
  if (root instanceof PickleDict) throw notNamed(root)
  const items = root instanceof PickleList ? root.items : root
  if (!Array.isArray(items)) throw payloadError(`${describePickle(root)} where a list of (name, tensor) was expected`)
  checkTensorCount(items.length)
  return items.map(item => {
    const pair = item instanceof PickleList ? item.items : item
    if (!Array.isArray(pair) || pair.length !== 2) throw payloadError(`${describePickle(item)} where a (name, tensor) was expected`)
    return pair as [PickleValue, PickleValue]
  })
}

function notNamed (root: PickleDict): RefitError {
  const names = root.keys.filter(key => typeof key === 'string')
  // Says what an adapter is, where it is one.
  for (const name of names) toTensorName(name)
  const hint = names.includes('flattened_tensor') ? '; a bucket is sent with load_format "flattened_bucket"' : ''
  return payloadError(`${describePickle(root)} where a list of (name, tensor) was expected${hint}`)
}
