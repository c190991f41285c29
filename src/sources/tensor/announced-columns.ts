import { dtypeOf, DTYPES } from '../../native/dtypes.ts'
import type { HandleColumns, TensorColumns } from '../../native/handles.ts'
import type { AnnouncedTensor, TensorPart } from '../../contract/weight-source.ts'
import { payloadError } from '../../wire/torch/tensor.ts'

/**
 * Announced tensors as columns, to be posted between threads: structured cloning of thousands of objects takes longer
 * than reading them.
 */
export interface AnnouncedColumns extends TensorColumns {
  /** By index, for tensors that are not row-major. */
  parts: ReadonlyMap<number, readonly TensorPart[]>
  /** Lists of ranks, and for each tensor the list of the ranks that load it. Null if all ranks load all tensors. */
  ranks: { lists: ReadonlyArray<readonly number[]>, of: Uint16Array<ArrayBuffer> } | null
}

/**
 * The most bytes of all names of a request, as in native/codec/handle_list.cc: a list may repeat one long name of the
 * pickle.
 */
const MAX_NAMES = 256 << 20

/** Throws TENSOR_PAYLOAD for names that take too much memory. */
export function packAnnounced (tensors: readonly AnnouncedTensor[]): AnnouncedColumns {
  const dims = Uint8Array.from(tensors, ({ shape }) => shape.length)
  const sizes = new Float64Array(dims.reduce((sum, count) => sum + count, 0))
  const nameEnds = new Int32Array(tensors.length)
  const parts = new Map<number, readonly TensorPart[]>()
  let names = ''
  let used = 0
  for (const [index, tensor] of tensors.entries()) {
    names += tensor.name
    if (names.length > MAX_NAMES) {
      throw payloadError(
        `the names of its ${tensors.length} tensors take more than ${MAX_NAMES} characters; send several requests`
      )
    }
    nameEnds[index] = names.length
    for (const size of tensor.shape) sizes[used++] = size
    if (tensor.parts !== undefined) parts.set(index, tensor.parts)
  }
  return {
    names,
    nameEnds,
    dtypes: Uint8Array.from(tensors, ({ dtype }) => DTYPES[dtype]),
    dims,
    sizes,
    sources: Int32Array.from(tensors, ({ source }) => source),
    offsets: Float64Array.from(tensors, ({ offset }) => offset),
    parts,
    ranks: packRanks(tensors)
  }
}

/**
 * Reads columns. A sender repeats the same names and shapes, so those of the last request are used again if they are
 * equal.
 */
export class AnnouncedReader {
  #last: { columns: AnnouncedColumns, names: string[], shapes: number[][] } | undefined

  read (columns: AnnouncedColumns): AnnouncedTensor[] {
    const { dtypes, sources, offsets, parts, ranks } = columns
    const last = this.#last
    const names =
      last !== undefined && columns.names === last.columns.names && areEqual(columns.nameEnds, last.columns.nameEnds)
        ? last.names
        : namesOf(columns)
    const shapes =
      last !== undefined && areEqual(columns.dims, last.columns.dims) && areEqual(columns.sizes, last.columns.sizes)
        ? last.shapes
        : shapesOf(columns)
    this.#last = { columns, names, shapes }
    const tensors = names.map((name, index): AnnouncedTensor => ({
      name,
      dtype: dtypeOf(dtypes[index]!),
      shape: shapes[index]!,
      source: sources[index]!,
      offset: offsets[index]!
    }))
    for (const [index, own] of parts) tensors[index]!.parts = own
    if (ranks !== null) {
      for (const [index, tensor] of tensors.entries()) {
        tensor.ranks = ranks.lists[ranks.of[index]!]!
      }
    }
    return tensors
  }
}

function namesOf (columns: TensorColumns): string[] {
  return Array.from(columns.nameEnds, (_, index) => nameAt(columns, index))
}

function nameAt ({ names, nameEnds }: TensorColumns, index: number): string {
  return names.slice(index === 0 ? 0 : nameEnds[index - 1]!, nameEnds[index]!)
}

function shapesOf ({ dims, sizes }: TensorColumns): number[][] {
  let end = 0
  return Array.from(dims, count => {
    end += count
    return Array.from(sizes.subarray(end - count, end))
  })
}

function areEqual (a: NodeJS.TypedArray, b: NodeJS.TypedArray): boolean {
  const bytes = (array: NodeJS.TypedArray): Buffer => Buffer.from(array.buffer, array.byteOffset, array.byteLength)
  return bytes(a).equals(bytes(b))
}

/** Columns of the native reader, with the source of each segment and the ranks of each list. */
export function announceLists (columns: HandleColumns, sourceOf: Int32Array, ranks: number[][]): AnnouncedColumns {
  const { names, nameEnds, dtypes, dims, sizes, offsets, ends } = columns
  const announced = {
    names,
    nameEnds,
    dtypes,
    dims,
    sizes,
    offsets,
    sources: columns.sources.map(segment => sourceOf[segment]!),
    parts: new Map<never, never>()
  }
  if (ranks.length === 1) return { ...announced, ranks: null }
  const of = new Uint16Array(dims.length)
  for (const [list, end] of ends.entries()) of.fill(list, list === 0 ? 0 : ends[list - 1]!, end)
  return { ...announced, ranks: { lists: ranks, of } }
}

/** The name of the first tensor in a segment. */
export function nameOfFirst (columns: HandleColumns, segment: number): string | undefined {
  const index = columns.sources.indexOf(segment)
  return index === -1 ? undefined : nameAt(columns, index)
}

/** All transferable memory of columns. */
export function buffersOf ({ nameEnds, dtypes, dims, sizes, sources, offsets }: TensorColumns): ArrayBuffer[] {
  return [nameEnds, dtypes, dims, sizes, sources, offsets].map(({ buffer }) => buffer)
}

function packRanks (tensors: readonly AnnouncedTensor[]): AnnouncedColumns['ranks'] {
  if (tensors.every(({ ranks }) => ranks === undefined)) return null
  const lists = new Map<string, { index: number, ranks: readonly number[] }>()
  const of = Uint16Array.from(tensors, ({ ranks = [] }) => {
    const key = ranks.join()
    let list = lists.get(key)
    if (list === undefined) lists.set(key, list = { index: lists.size, ranks })
    return list.index
  })
  return { lists: [...lists.values()].map(({ ranks }) => ranks), of }
}
