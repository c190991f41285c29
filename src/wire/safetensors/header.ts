import { RefitError } from '../../errors.ts'
import { SAFETENSORS_BITS } from './dtypes.ts'
import { clip, JsonSyntaxError, StrictJson } from '../strict-json.ts'

// A safetensors file is a u64 (little-endian) with the header's length N, N bytes of JSON, and the data. This parser
// refuses four things that the reference parser accepts (duplicate names, unknown fields, leading space, trailing
// newline): no known writer makes them, and each can be read in two ways.

/** Bytes before the JSON. */
export const PREFIX_BYTES = 8
/** The format's own limit. */
export const MAX_HEADER_BYTES = 100_000_000
/** Several times as many as the largest model has. A header of 100 MB could list enough tensors to use all memory. */
export const MAX_TENSORS = 500_000
/** Bytes of `__metadata__`, which is read at once. */
const MAX_METADATA = 65_536
const MAX_NAME = 2048
const MAX_DIMS = 32
/** Parsed before a possible pause. */
export const ENTRIES_PER_SLICE = 64
const SPACE = 0x20

export interface SafetensorsTensor {
  name: string
  /** The format's name of the dtype: BF16, F32, F8_E4M3, ... */
  dtype: string
  shape: number[]
  /** Bytes from the start of the file; `end` is exclusive. */
  begin: number
  end: number
}

export interface SafetensorsHeader {
  /** In the order of their bytes in the file. */
  tensors: SafetensorsTensor[]
  metadata: Map<string, string>
}

/** The error for a bad file, with the name by which the caller knows the file. */
export function formatError (file: string, message: string, tensor?: string): RefitError {
  const where = tensor === undefined ? file : `${file}: tensor ${JSON.stringify(clip(tensor))}`
  return new RefitError(
    'CHECKPOINT_FORMAT',
    `${where}: ${message}`,
    tensor === undefined ? {} : { param: clip(tensor) }
  )
}

/**
 * The JSON's length, from the first 8 bytes of a file of `fileBytes`. It is checked before memory for the JSON is
 * allocated.
 */
export function headerLength (prefix: Uint8Array, fileBytes: number, file: string): number {
  if (fileBytes < PREFIX_BYTES + 2 || prefix.length < PREFIX_BYTES) {
    throw formatError(file, `${fileBytes} bytes are too few for a safetensors file`)
  }
  const length = new DataView(prefix.buffer, prefix.byteOffset, PREFIX_BYTES).getBigUint64(0, true)
  if (length > BigInt(MAX_HEADER_BYTES)) {
    throw formatError(file, `a header of ${length} bytes (at most ${MAX_HEADER_BYTES}); is it a safetensors file?`)
  }
  if (length < 2n) throw formatError(file, `a header of ${length} bytes is too short for JSON`)
  if (Number(length) + PREFIX_BYTES > fileBytes) {
    throw formatError(
      file,
      `its header takes ${length} bytes, but the file has ${fileBytes}: it is cut off or still being written`
    )
  }
  return Number(length)
}

/** Parses and checks the JSON of a file of `fileBytes`. Throws CHECKPOINT_FORMAT, naming the tensor. */
export function parseHeader (json: Uint8Array, fileBytes: number, file: string): SafetensorsHeader {
  return atOnce(parseHeaderInSlices(json, fileBytes, file))
}

/** Runs all slices of a parser without a pause, and returns its result. */
export function atOnce<T> (steps: Generator<undefined, T, undefined>): T {
  for (;;) {
    const { done, value } = steps.next()
    if (done === true) return value
  }
}

/**
 * Like `parseHeader`, but pauses every few tensors, so that a long header need not block an event loop. With
 * `fileBytes` null (not known yet) the file must end where its last tensor ends.
 */
export function* parseHeaderInSlices (
  json: Uint8Array,
  fileBytes: number | null,
  file: string
): Generator<undefined, SafetensorsHeader, undefined> {
  if (json[0] !== 0x7b) throw formatError(file, "its header does not begin with '{'; is it a safetensors file?")
  const reader = new StrictJson(json)
  const dataStart = PREFIX_BYTES + json.length
  const tensors: SafetensorsTensor[] = []
  let metadata = new Map<string, string>()
  try {
    for (const name of reader.entries()) {
      if (name === '__metadata__') {
        metadata = readMetadata(reader, file)
        continue
      }
      if (tensors.length === MAX_TENSORS) throw formatError(file, `more than ${MAX_TENSORS} tensors`)
      tensors.push(readEntry(reader, name, dataStart, file))
      if (tensors.length % ENTRIES_PER_SLICE === 0) yield
    }
    reader.end(SPACE)
  } catch (error) {
    if (error instanceof JsonSyntaxError) throw formatError(file, `bad header: ${error.message}`)
    throw error
  }
  tensors.sort((a, b) => a.begin - b.begin || a.end - b.end)
  yield
  checkLayout(tensors, dataStart, fileBytes, file)
  return { tensors, metadata }
}

function readMetadata (reader: StrictJson, file: string): Map<string, string> {
  const metadata = new Map<string, string>()
  for (const key of reader.entries()) {
    if (metadata.size === MAX_METADATA) throw formatError(file, `more than ${MAX_METADATA} entries of __metadata__`)
    metadata.set(key, reader.string())
  }
  return metadata
}

function readEntry (reader: StrictJson, name: string, dataStart: number, file: string): SafetensorsTensor {
  if (name === '' || name.length > MAX_NAME || name.includes('\0')) {
    throw formatError(file, 'an empty name, a name with NUL, or one too long', name)
  }
  let dtype: string | undefined
  let shape: number[] | undefined
  let offsets: number[] | undefined
  for (const field of reader.entries()) {
    if (field === 'dtype') dtype = reader.string()
    else if (field === 'shape') shape = reader.uints(MAX_DIMS)
    else if (field === 'data_offsets') offsets = reader.uints(2)
    else throw formatError(file, `the unknown field ${JSON.stringify(clip(field))}`, name)
  }
  if (dtype === undefined || shape === undefined || offsets === undefined) {
    throw formatError(file, 'needs dtype, shape and data_offsets', name)
  }
  if (offsets.length !== 2) throw formatError(file, `data_offsets has ${offsets.length} numbers, not 2`, name)
  const [begin, end] = offsets as [number, number]
  const bytes = byteLength(dtype, shape, name, file)
  if (end - begin !== bytes) {
    throw formatError(
      file,
      `${dtype} [${shape.join(', ')}] takes ${bytes} bytes, but data_offsets [${begin}, ${end}] hold ${end - begin}`,
      name
    )
  }
  return { name, dtype, shape, begin: dataStart + begin, end: dataStart + end }
}

function byteLength (dtype: string, shape: number[], name: string, file: string): number {
  const bits = SAFETENSORS_BITS.get(dtype)
  if (bits === undefined) throw formatError(file, `the unknown dtype ${JSON.stringify(clip(dtype))}`, name)
  // As in the reference implementation, an overflow before a later 0 is an overflow.
  let total = bits
  for (const dim of shape) {
    total *= dim
    if (total > Number.MAX_SAFE_INTEGER) throw formatError(file, `shape [${shape.join(', ')}] is too big`, name)
  }
  if (total % 8 !== 0) throw formatError(file, `${dtype} [${shape.join(', ')}] does not end on a byte`, name)
  return total / 8
}

function checkLayout (tensors: SafetensorsTensor[], dataStart: number, fileBytes: number | null, file: string): void {
  let at = dataStart
  for (const { name, begin, end } of tensors) {
    if (begin !== at) {
      const what = begin > at ? `leaves a hole of ${begin - at} bytes` : `overlaps its neighbour by ${at - begin} bytes`
      throw formatError(file, `begins at ${begin - dataStart} of the data and ${what}`, name)
    }
    at = end
  }
  if (fileBytes !== null && at !== fileBytes) {
    const hint = at > fileBytes ? 'it is cut off or still being written' : 'bytes follow that no tensor owns'
    throw formatError(file, `its tensors end at byte ${at}, but the file has ${fileBytes}: ${hint}`)
  }
}
