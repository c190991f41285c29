import {
  describePickle,
  PickleBytes,
  PickleDict,
  PickleFloat,
  PickleList,
  PickleName,
  PickleObject,
  PickleSet
} from '../pickle/values.ts'
import type { PickleValue } from '../pickle/values.ts'
import type { PickleNames } from '../pickle/read.ts'
import { readPayload } from './payload.ts'
import { isGpuDict, toGpuUuid } from './gpus.ts'
import { torchNames } from './names.ts'
import { readTensor, takeSpares } from './rebuild.ts'
import { collect } from './find-storages.ts'
import { StorageTable } from './storage.ts'
import type { TensorRequestBody } from './body.ts'
import { payloadError } from './tensor.ts'
import type { TensorDescriptor } from './tensor.ts'
import { checkTensorCount } from './tensor-name.ts'

// Some trainers pickle a request of their own as plain data with handles in it, and send the pickle in a tensor. This
// reads such a pickle for custom loaders: by the same closed set, with the classes that the loader names as records of
// their fields.

/**
 * None, bool, int and str as in JavaScript. Tuples, lists and sets are arrays. A dict is an object without a prototype
 * if all keys are text, else a Map. Bytes are a Uint8Array, dtypes their names, instances of named classes objects of
 * their fields. A tensor is a TensorMark, because this value crosses threads and its tensors follow separately.
 */
export type PlainValue =
  | null
  | boolean
  | number
  | bigint
  | string
  | Uint8Array
  | TensorMark
  | PlainValue[]
  | Map<PlainValue, PlainValue>
  | { [key: string]: PlainValue }

/** One number: the tensor's index in the body. Nothing else is read into a Float64Array. */
export type TensorMark = Float64Array

export interface PlainBody extends TensorRequestBody {
  value: PlainValue
}

const MAX_DEPTH = 64

/** The closed set, and classes by name in any module. */
function plainNames (classes: readonly string[]): PickleNames {
  return (module, name) =>
    torchNames(module, name) ?? (classes.includes(name) ? new PickleName(module, name, 'class', 'record') : undefined)
}

/**
 * Reads a pickle, or base64 of one. `gpus`: the UUID of each rank's. Throws PICKLE_*, TENSOR_PAYLOAD or UNSUPPORTED.
 */
export function readPlain (
  bytes: Uint8Array,
  classes: readonly string[],
  ranks: number,
  gpus: readonly string[]
): PlainBody {
  const root = readPayload(bytes, plainNames(classes))
  const storages = new StorageTable()
  const reader = new PlainReader(storages, ranks, gpus)
  const value = reader.read(root, 0)
  const spares = takeSpares(storages)
  // Storages of handles that are not in the place of a tensor are released too.
  const used = new Set(storages.list)
  collect(root, storages)
  return {
    value,
    ranks: reader.tensors,
    storages: [...used],
    spares: [...new Set([...spares, ...storages.list.filter(storage => !used.has(storage))])]
  }
}

class PlainReader {
  /** Per rank, in the order of their marks. */
  readonly tensors: TensorDescriptor[][]
  readonly #storages: StorageTable
  readonly #gpus: Array<string | undefined>
  /** By identity, so that a value in several places stays one value. Undefined while the value is read. */
  readonly #seen = new Map<object, PlainValue | undefined>()

  constructor (storages: StorageTable, ranks: number, gpus: readonly string[]) {
    this.#storages = storages
    this.#gpus = Array.from({ length: ranks }, (_, rank) => toGpuUuid(gpus[rank] ?? ''))
    this.tensors = this.#gpus.map(() => [])
  }

  read (value: PickleValue, depth: number): PlainValue {
    if (value === null || typeof value !== 'object') return value
    if (this.#seen.has(value)) {
      const known = this.#seen.get(value)
      if (known === undefined) throw payloadError('a value that holds itself')
      return known
    }
    if (depth > MAX_DEPTH) throw payloadError(`values nest deeper than ${MAX_DEPTH}`)
    this.#seen.set(value, undefined)
    const plain = this.#plain(value, depth + 1)
    this.#seen.set(value, plain)
    return plain
  }

  #plain (value: Exclude<PickleValue, null | boolean | number | bigint | string>, depth: number): PlainValue {
    if (isTensor(value)) return this.#tensor(value)
    if (Array.isArray(value)) return value.map(item => this.read(item, depth))
    if (value instanceof PickleList || value instanceof PickleSet) {
      return value.items.map(item => this.read(item, depth))
    }
    if (value instanceof PickleDict) return this.#dict(value, depth)
    // A copy, because postMessage clones the whole buffer behind a view.
    if (value instanceof PickleBytes) return new Uint8Array(value.view())
    if (value instanceof PickleFloat) return value.value
    if (value instanceof PickleName && value.role === 'dtype') return value.name
    if (value instanceof PickleObject && value.name.role === 'record') {
      return this.#dict(value.state ?? new PickleDict(), depth)
    }
    throw payloadError(`${describePickle(value)} where plain data or a tensor was expected`)
  }

  #dict ({ keys, values }: PickleDict, depth: number): PlainValue {
    const entries = keys.map((
      key,
      index
    ): [PlainValue, PlainValue] => [this.read(key, depth), this.read(values[index]!, depth)])
    if (!keys.every(key => typeof key === 'string')) return new Map(entries)
    const object = Object.create(null) as { [key: string]: PlainValue }
    for (const [key, value] of entries) object[key as string] = value
    return object
  }

  #tensor (value: PickleValue): TensorMark {
    const index = this.tensors[0]!.length
    checkTensorCount(index + 1)
    const shared = isGpuDict(value) ? undefined : readTensor(`tensor ${index}`, value, this.#storages)
    for (const [rank, gpu] of this.#gpus.entries()) {
      this.tensors[rank]!.push(shared ?? readTensor(`tensor ${index}`, value, this.#storages, gpu))
    }
    return Float64Array.of(index)
  }
}

/** True for a handle in any form that readTensor knows. */
function isTensor (value: PickleValue): boolean {
  if (value instanceof PickleObject) return value.name.role.startsWith('rebuild_')
  if (Array.isArray(value)) {
    return value.length === 2 && value[0] instanceof PickleName && value[0].role.startsWith('rebuild_')
  }
  return isGpuDict(value)
}
