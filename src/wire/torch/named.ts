import type { RefitError } from '../../errors.ts'
import { describePickle, PickleBytes, PickleDict, PickleList, PickleObject } from '../pickle/values.ts'
import type { PickleValue } from '../pickle/values.ts'
import { isGpuDict } from './gpus.ts'
import { readNested } from './payload.ts'
import { isOffer, readTensor } from './rebuild.ts'
import type { StorageTable } from './storage.ts'
import { payloadError } from './tensor.ts'
import type { TensorDescriptor } from './tensor.ts'
import { checkTensorCount, nameTensor, toTensorName, toWeightName } from './tensor-name.ts'

// A list of (name, tensor) or a dict of tensors by name. A tensor may be verl's LocalSerializedTensor, which holds a
// pickle for every rank, or vLLM's dict of handles by GPU.

/** The tensors that one entry holds for each rank. */
export class NamedTensors {
  readonly #pairs: Array<[name: PickleValue, tensor: PickleValue]>
  readonly #storages: StorageTable
  readonly #toName: (value: PickleValue) => string
  /** By the bytes that were read, so that bytes in several places are read once. */
  readonly #nested = new Map<PickleBytes, TensorDescriptor>()
  /** True if ranks get different tensors. */
  readonly perRank: boolean

  /** `isAdapter`: parts of an adapter are welcome; otherwise they are refused. */
  constructor (root: PickleValue, storages: StorageTable, isAdapter = false) {
    this.#pairs = toPairs(root)
    this.#storages = storages
    this.#toName = isAdapter ? toTensorName : toWeightName
    this.perRank = this.#pairs.some(pair => isLocal(pair[1]) || isOffer(pair[1]))
  }

  /** `gpu`: the rank's own. Throws TENSOR_PAYLOAD, UNSUPPORTED and, for tensors in pickles of their own, PICKLE_*. */
  forRank (rank: number, gpu?: string): TensorDescriptor[] {
    return this.#pairs.map(pair => {
      const name = this.#toName(pair[0])
      const value = pair[1]
      if (!isLocal(value)) return readTensor(name, value, this.#storages, gpu)
      try {
        return this.#local(name, value as PickleObject, rank)
      } catch (error) {
        throw nameTensor(error, name)
      }
    })
  }

  #local (name: string, value: PickleObject, rank: number): TensorDescriptor {
    const values = value.state?.get('values')
    if (!(values instanceof PickleList)) {
      throw payloadError(`a LocalSerializedTensor with ${describePickle(values)} for values`)
    }
    const mine = values.items[values.items.length === 1 ? 0 : rank]
    if (mine === undefined) {
      throw payloadError(
        `a LocalSerializedTensor has values for ${values.items.length} ranks, and this is rank ${rank}`
      )
    }
    if (!(mine instanceof PickleBytes)) {
      throw payloadError(`a LocalSerializedTensor holds ${describePickle(mine)}, not bytes`)
    }
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
  if (root instanceof PickleDict) return dictPairs(root)
  const items = root instanceof PickleList ? root.items : root
  if (!Array.isArray(items)) throw payloadError(`${describePickle(root)} where a list of (name, tensor) was expected`)
  checkTensorCount(items.length)
  return items.map(item => {
    const pair = item instanceof PickleList ? item.items : item
    if (!Array.isArray(pair) || pair.length !== 2) {
      throw payloadError(`${describePickle(item)} where a (name, tensor) was expected`)
    }
    return pair as [PickleValue, PickleValue]
  })
}

function dictPairs (root: PickleDict): Array<[name: PickleValue, tensor: PickleValue]> {
  const misread = (hint: string): RefitError =>
    payloadError(`${describePickle(root)} where a list of (name, tensor) was expected; ${hint}`)
  if (root.keys.includes('flattened_tensor') && root.keys.includes('metadata')) {
    throw misread('a bucket is sent with load_format "flattened_bucket"')
  }
  const byGpu: boolean = isGpuDict(root)
  if (byGpu) throw misread('its keys are GPUs, and the names of tensors belong around them: [(name, {GPU: handle})]')
  checkTensorCount(root.size)
  return root.keys.map((key, index) => [key, root.values[index]!])
}
