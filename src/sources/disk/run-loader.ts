import { errorMessage, RefitError } from '../../errors.ts'
import type { NativeSource } from '../../native/write-job.ts'
import { contiguous } from '../../wire/torch/bucket.ts'
import { describeUnreadDType, torchItemBytes, torchWeightDType } from '../../wire/torch/dtypes.ts'
import { countElements } from '../../wire/torch/extent.ts'
import type { PlainValue } from '../../wire/torch/plain.ts'
import { payloadError } from '../../wire/torch/tensor.ts'
import type { MemoryStorage, TensorDescriptor, TensorStorage } from '../../wire/torch/tensor.ts'
import { checkTensorCount, toWeightName } from '../../wire/torch/tensor-name.ts'
import { LoaderReads, MAX_READ_BYTES } from './loader-reads.ts'
import { LoaderTensor } from './loader-tensor.ts'
import type { LoadedTensor, LoaderTools, MadeTensor, WeightLoader } from './weight-loader.ts'

/** The tensors of a request, or of a pickle in it, once they are open. */
export interface OpenTensors {
  /** Per rank. Ranks with the same tensors share one array. */
  ranks: readonly TensorDescriptor[][]
  sources: readonly NativeSource[]
  /** Index of the source in which a storage lies. */
  sourceOf: ReadonlyMap<TensorStorage, number>
}

export interface LoaderRun {
  name: string
  loader: WeightLoader
  opened: OpenTensors
  /** Reads a pickle as plain data with marks for tensors, and opens their memory until the request ends. */
  unpickle: (bytes: Uint8Array, classes: readonly string[]) => Promise<OpenTensors & { value: PlainValue }>
}

const MAX_MS = 60_000

/**
 * Runs a loader, which makes weights of the tensors. Throws WEIGHT_LOADER, or the error that its tools threw; no read
 * is running then.
 */
export async function runLoader ({ name, loader, opened, unpickle }: LoaderRun): Promise<OpenTensors> {
  const sources = [...opened.sources]
  const sourceOf = new Map(opened.sourceOf)
  const reads = new LoaderReads(storage => sources[sourceOf.get(storage) ?? -1])
  const pickles = new Map<string, Promise<OpenTensors & { value: PlainValue }>>()
  const end = new AbortController()
  const timer = setTimeout(() => {
    end.abort(new RefitError('WEIGHT_LOADER', `it has not returned within ${MAX_MS / 1000} s`))
  }, MAX_MS)
  try {
    const ranks: TensorDescriptor[][] = []
    for (const group of groupRanks(opened.ranks)) {
      const run = async (): Promise<LoadedTensor[]> => await collect(await loader(group.tensors, tools(group.ranks)))
      const loaded = await untilAborted(run(), end.signal)
      const lists = describe(loaded, group.ranks, sources, sourceOf)
      for (const [index, rank] of group.ranks.entries()) ranks[rank] = lists[index]!
    }
    return { ranks, sources, sourceOf }
  } catch (error) {
    throw named(name, error)
  } finally {
    clearTimeout(timer)
    end.abort(new RefitError('WEIGHT_LOADER', 'the request has ended'))
    await reads.end()
  }

  /** The references of a pickle can be released only once, so equal pickles are opened once. */
  async function openOnce (
    bytes: Uint8Array,
    classes: readonly string[]
  ): Promise<OpenTensors & { value: PlainValue }> {
    const key = Buffer.from(bytes).toString('latin1')
    let opening = pickles.get(key)
    if (opening === undefined) {
      // A copy, because postMessage clones the whole buffer behind a view.
      pickles.set(
        key,
        opening = unpickle(new Uint8Array(bytes), classes).then(more => {
          for (const [storage, index] of more.sourceOf) {
            sourceOf.set(
              storage,
              index === -1 ? -1 : index + sources.length
            )
          }
          sources.push(...more.sources)
          return more
        })
      )
    }
    return await opening
  }

  function tools (ranks: readonly number[]): LoaderTools {
    return {
      ranks,
      signal: end.signal,
      read: heard(async (tensor: LoaderTensor) => await reads.read(LoaderTensor.ranksOf(requireTensor(tensor))[0]!)),
      unpickle: heard(async (bytes: Uint8Array, { classes = [] }: { classes?: readonly string[] } = {}) =>
        await unpickled(ranks, bytes, classes)
      )
    }
  }

  async function unpickled (ranks: readonly number[], bytes: Uint8Array, classes: readonly string[]): Promise<unknown> {
    end.signal.throwIfAborted()
    if (!(bytes instanceof Uint8Array)) throw bad(`it unpickles ${what(bytes)}, not bytes`)
    if (bytes.byteLength > MAX_READ_BYTES) {
      throw bad(`it unpickles ${bytes.byteLength} bytes, and ${MAX_READ_BYTES} are the most`)
    }
    const more = await openOnce(bytes, classes)
    return withTensors(
      more.value,
      index => new LoaderTensor(ranks.map(rank => ({ ...more.ranks[rank]![index]!, name: `tensor ${index}` })))
    )
  }
}

/** A loader may leave a promise unawaited; its rejection must not end the process. */
function heard<A extends unknown[], T> (tool: (...args: A) => Promise<T>): (...args: A) => Promise<T> {
  return (...args) => {
    const promise = tool(...args)
    promise.catch(() => {})
    return promise
  }
}

/** Groups ranks with the same tensors, and wraps the tensors for a loader. */
function groupRanks (ranks: readonly TensorDescriptor[][]): Array<{ ranks: number[], tensors: LoaderTensor[] }> {
  const groups = new Map<TensorDescriptor[], { ranks: number[], tensors: LoaderTensor[] }>()
  for (const [rank, tensors] of ranks.entries()) {
    const group = groups.get(tensors)
    if (group === undefined) groups.set(tensors, { ranks: [rank], tensors: [] })
    else group.ranks.push(rank)
  }
  for (const [tensors, group] of groups) {
    group.tensors = tensors.map(tensor => new LoaderTensor(group.ranks.map(() => tensor)))
  }
  return [...groups.values()]
}

async function collect (loaded: Iterable<LoadedTensor> | AsyncIterable<LoadedTensor>): Promise<LoadedTensor[]> {
  if (typeof loaded !== 'object' || loaded === null || !(Symbol.iterator in loaded || Symbol.asyncIterator in loaded)) {
    throw bad(`it returned ${what(loaded)}, not a list of [name, tensor]`)
  }
  const list: LoadedTensor[] = []
  for await (const pair of loaded) {
    checkTensorCount(list.push(pair))
  }
  return list
}

/**
 * The loaded tensors, per rank of the group; one array for all if they are the same. Adds sources for memory that the
 * loader made.
 */
function describe (
  loaded: readonly LoadedTensor[],
  ranks: readonly number[],
  sources: NativeSource[],
  sourceOf: Map<TensorStorage, number>
): TensorDescriptor[][] {
  const rows = loaded.map((pair: unknown, index) => {
    if (!Array.isArray(pair) || pair.length !== 2) {
      throw bad(`element ${index} of what it returned is ${what(pair)}, not [name, tensor]`)
    }
    const name = toWeightName(pair[0] as string)
    const tensors = pair[1] instanceof LoaderTensor
      ? LoaderTensor.ranksOf(pair[1])
      : made(name, pair[1] as MadeTensor, ranks, sources, sourceOf)
    return tensors.map(tensor => checked({ ...tensor, name }, sourceOf))
  })
  const isSame = rows.every(row =>
    row.every(({ storage, offset }) => storage === row[0]!.storage && offset === row[0]!.offset)
  )
  const first = rows.map(row => row[0]!)
  return ranks.map((_, index) => isSame ? first : rows.map(row => row[index]!))
}

function checked (tensor: TensorDescriptor, sourceOf: ReadonlyMap<TensorStorage, number>): TensorDescriptor {
  if (torchWeightDType(tensor.dtype) === undefined) throw payloadError(describeUnreadDType(tensor.dtype), tensor.name)
  if (tensor.storage.kind !== 'empty' && !sourceOf.has(tensor.storage)) {
    throw payloadError(
      'it belongs to another request',
      tensor.name
    )
  }
  return tensor
}

function made (
  name: string,
  tensor: MadeTensor,
  ranks: readonly number[],
  sources: NativeSource[],
  sourceOf: Map<TensorStorage, number>
): TensorDescriptor[] {
  if (typeof tensor !== 'object' || tensor === null || !(tensor.data instanceof Uint8Array)) {
    throw payloadError(
      `it is ${what(tensor)}: neither one of the tensors that were sent nor { dtype, shape, data: Uint8Array }`,
      name
    )
  }
  const { dtype, shape, data } = tensor
  const itemBytes = torchItemBytes(String(dtype))
  if (itemBytes === undefined) throw payloadError(describeUnreadDType(String(dtype)), name)
  if (!Array.isArray(shape) || !shape.every(size => Number.isSafeInteger(size) && size >= 0)) {
    throw payloadError('its shape is not a list of whole numbers from 0 up', name)
  }
  const bytes = countElements(shape, name) * itemBytes
  if (data.byteLength !== bytes) {
    throw payloadError(`${dtype} [${shape.join(', ')}] takes ${bytes} bytes, and its data has ${data.byteLength}`, name)
  }
  const storage: MemoryStorage = { kind: 'memory', data, bytes }
  sourceOf.set(storage, sources.push({ buffer: data }) - 1)
  const descriptor = { name, dtype, shape: [...shape], stride: contiguous(shape), offset: 0, storage }
  return ranks.map(() => descriptor)
}

function requireTensor (tensor: unknown): LoaderTensor {
  if (tensor instanceof LoaderTensor) return tensor
  throw bad(`it reads ${what(tensor)}, which is not one of the tensors that were sent`)
}

/** The same data with a tensor in place of each mark. A value in several places stays one value. */
function withTensors (root: PlainValue, tensorOf: (index: number) => LoaderTensor): unknown {
  const seen = new Map<object, unknown>()
  const walk = (value: unknown): unknown => {
    if (typeof value !== 'object' || value === null || value instanceof Uint8Array) return value
    const known = seen.get(value)
    if (known !== undefined) return known
    const made = value instanceof Float64Array
      ? tensorOf(value[0]!)
      : Array.isArray(value)
      ? value.map(walk)
      : value instanceof Map
      ? new Map([...value].map(([key, item]) => [walk(key), walk(item)]))
      : Object.assign(
        Object.create(null) as object,
        Object.fromEntries(Object.entries(value).map(([key, item]) => [key, walk(item)]))
      )
    seen.set(value, made)
    return made
  }
  return walk(root)
}

async function untilAborted<T> (promise: Promise<T>, signal: AbortSignal): Promise<T> {
  return await new Promise((resolve, reject) => {
    signal.addEventListener('abort', () => {
      try {
        signal.throwIfAborted()
      } catch (error) {
        reject(error)
      }
    }, { once: true })
    promise.then(resolve, reject)
  })
}

function named (name: string, error: unknown): RefitError {
  const prefix = `weight loader ${JSON.stringify(name)}: `
  // An error of the loader's tools may be caused by the sender as well as by the loader.
  if (error instanceof RefitError && error.statusCode === 400) {
    return new RefitError(
      error.code,
      prefix + error.message,
      {
        cause: error,
        ...error.param === undefined
          ? {}
          : { param: error.param }
      }
    )
  }
  if (error instanceof RefitError) return error
  return new RefitError(
    'WEIGHT_LOADER',
    `${prefix}it failed: ${errorMessage(error)}`,
    { param: 'load_format', cause: error }
  )
}

function bad (message: string): RefitError {
  return new RefitError('WEIGHT_LOADER', message, { param: 'load_format' })
}

function what (value: unknown): string {
  return value === null
    ? 'null'
    : Array.isArray(value)
    ? `an array of ${value.length}`
    : typeof value === 'object'
    ? 'an object'
    : value === undefined
    ? 'nothing'
    : `a ${typeof value}`
}
