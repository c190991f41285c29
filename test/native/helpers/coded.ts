import { openSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { DTYPES, bytesOf } from '../../../src/native/dtypes.ts'
import { toF16 } from '../../helpers/dtype-values.ts'
import { TENSOR, TENSOR_FIELDS } from '../../../src/native/write-layout.ts'
import type { DType } from '../../../src/native/dtypes.ts'
import type { NativeSource, WriteJob } from '../../../src/native/write-job.ts'
import type { PlainModel, PlainTensor } from './plain-core.ts'

const words = new Uint32Array(1)
const floats = new Float32Array(words.buffer)

/** Bits of element `index` of a tensor: any pattern of its dtype, including NaN, infinities and subnormals. */
export function codedBits (tensor: string, index: number, dtype: DType): number {
  let h = 0x811c9dc5
  for (let i = 0; i < tensor.length; i++) h = Math.imul(h ^ tensor.charCodeAt(i), 0x01000193)
  h = Math.imul(h ^ index, 0x85ebca6b)
  h = Math.imul(h ^ h >>> 13, 0xc2b2ae35)
  h = (h ^ h >>> 16) >>> 0
  return bytesOf(dtype) === 2 ? h & 0xffff : h
}

/**
 * The bits of an element after a write: exact to a wider dtype, rounded to nearest even to one of 16 bits, where
 * a NaN becomes quiet.
 */
export function convertBits (bits: number, from: DType, to: DType): number {
  if (from === to) return bits
  if (from === 'bfloat16') words[0] = bits << 16
  else if (from === 'float32') words[0] = bits
  else if ((bits & 0x7c00) === 0x7c00) words[0] = (bits & 0x8000) << 16 | 0x7f800000 | (bits & 0x3ff) << 13
  else {
    const exponent = bits >> 10 & 31
    const magnitude = exponent === 0 ? (bits & 0x3ff) * 2 ** -24 : (1024 + (bits & 0x3ff)) * 2 ** (exponent - 25)
    floats[0] = (bits & 0x8000) === 0 ? magnitude : -magnitude
  }
  const wide = words[0]!
  if (to === 'float32') return wide
  if (to === 'float16') {
    const isNan = (wide & 0x7fffffff) > 0x7f800000
    return isNan ? wide >>> 16 & 0x8000 | 0x7e00 | wide >>> 13 & 0x3ff : toF16(floats[0]!)
  }
  if ((wide & 0x7fffffff) > 0x7f800000) return wide >>> 16 | 0x40
  return Math.floor((wide + 0x7fff + (wide >>> 16 & 1)) / 65536) & 0xffff
}

export interface CodedOptions {
  dtype?: DType
  /** Bytes before each tensor, because offsets need no alignment. */
  gap?: number
  /** A folder to write a file into; without it the source is memory. */
  folder?: string
  bits?: typeof codedBits
}

export interface CodedJob {
  job: WriteJob
  path: string | undefined
  fd: number | undefined
  bytes: number
  ends: number[]
}

/** A job with the tensors in one source. A caller that passes a folder closes the file. */
export function codedJob (
  tensors: PlainTensor[],
  { dtype = 'bfloat16', gap = 0, folder, bits = codedBits }: CodedOptions = {}
): CodedJob {
  const element = bytesOf(dtype)
  const ends: number[] = []
  const fields: number[] = []
  let end = 0
  for (const tensor of tensors) {
    const offset = end + gap
    fields.push(0, offset, DTYPES[dtype], tensor.rows, tensor.cols, tensor.cols * element, element)
    end = offset + tensor.rows * tensor.cols * element
    ends.push(end)
  }
  const buffer = new Uint8Array(end)
  const view = new DataView(buffer.buffer)
  for (const [t, tensor] of tensors.entries()) {
    for (let i = 0; i < tensor.rows * tensor.cols; i++) {
      const at = fields[t * TENSOR_FIELDS + TENSOR.offset]! + i * element
      if (element === 2) view.setUint16(at, bits(tensor.name, i, dtype), true)
      else view.setUint32(at, bits(tensor.name, i, dtype), true)
    }
  }
  const path = folder === undefined ? undefined : join(folder, `coded-${dtype}-${gap}.bin`)
  if (path !== undefined) writeFileSync(path, buffer)
  const fd = path === undefined ? undefined : openSync(path, 'r')
  const source: NativeSource = fd === undefined ? { buffer } : { fd }
  const rects = tensors.flatMap((tensor, t) => tensor.rects.flatMap(rect => [t, ...rect]))
  return {
    job: { sources: [source], tensors: Float64Array.from(fields), rects: Float64Array.from(rects) },
    path,
    fd,
    bytes: end - gap * tensors.length,
    ends
  }
}

/** The expected parameters after the tensors are written over `before`. */
export function expectedParams (
  model: PlainModel,
  tensors: PlainTensor[],
  dtype: DType,
  before: Uint8Array[],
  bits = codedBits
): Uint8Array[] {
  const { config } = model
  const out = before.map(bytes => bytes.slice())
  for (const tensor of tensors) {
    for (const [rank, param, srcRow, srcCol, rows, cols, dstRow, dstCol] of tensor.rects) {
      const bytes = out[rank * config.params.length + param]!
      const view = new DataView(bytes.buffer)
      for (let r = 0; r < rows; r++) {
        for (let c = 0; c < cols; c++) {
          const value = convertBits(
            bits(tensor.name, (srcRow + r) * tensor.cols + srcCol + c, dtype),
            dtype,
            config.dtype
          )
          const index = (dstRow + r) * config.params[param]!.cols + dstCol + c
          if (config.dtype === 'float32') view.setUint32(index * 4, value, true)
          else view.setUint16(index * 2, value, true)
        }
      }
    }
  }
  return out
}
