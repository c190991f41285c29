import { createHash } from 'node:crypto'
import { closeSync, copyFileSync, mkdirSync, openSync, readdirSync, statSync, writeSync } from 'node:fs'
import { join } from 'node:path'
import { RefitError } from '../errors.ts'
import { isHeld } from '../native/dtypes.ts'
import { readValues, writeValues } from '../native/held-values.ts'
import { encodeHeader } from '../wire/safetensors/encode.ts'
import { SINGLE_NAME } from '../wire/safetensors/index.ts'
import { readCheckpoint, TO_SAFETENSORS } from './checkpoint.ts'
import type { Tensor } from './checkpoint.ts'

export type VariantName = 'A' | 'B' | 'C'

/** A checkpoint of the served model. A is the model itself; B and C differ from it in every tensor. */
export interface Variant {
  readonly name: VariantName
  readonly tensors: readonly Tensor[]
  /** Its folder inside the work folder. */
  readonly folder: string
}

/**
 * How far B and C are from A, relative to a tensor's root mean square. Answers differ clearly, and nothing overflows.
 */
const DISTANCE = 0.25
const MAX_SIDE_FILE = 32 << 20

/** Writes A, B and C into `work`, one file each, beside the model's own small files. */
export function writeVariants (model: string, work: string): Record<VariantName, Variant> {
  const tensors = readCheckpoint(model)
  if (!tensors.some(({ dtype }) => isHeld(dtype))) {
    throw new RefitError('CHECKPOINT_FORMAT', `${model} has no tensor of bfloat16, float16 or float32`, {
      param: 'model'
    })
  }
  const write = (name: VariantName, changed: readonly Tensor[]): Variant => {
    const folder = join(work, name)
    writeFolder(folder, changed, model)
    return { name, folder, tensors: readCheckpoint(folder) }
  }
  return {
    A: write('A', tensors),
    B: write('B', tensors.map(tensor => perturb(tensor, 'B'))),
    C: write('C', tensors.map(tensor => perturb(tensor, 'C')))
  }
}

/** Writes tensors as one file. With `model`, its configuration and tokenizer are copied beside it. */
export function writeFolder (folder: string, tensors: readonly Tensor[], model?: string): void {
  mkdirSync(folder, { recursive: true })
  if (model !== undefined) copySideFiles(model, folder)
  const fd = openSync(join(folder, SINGLE_NAME), 'w')
  try {
    writeAll(fd, safetensorsHeader(tensors))
    for (const { bytes } of tensors) writeAll(fd, bytes())
  } finally {
    closeSync(fd)
  }
}

/** The start of a file that holds the tensors in this order. */
export function safetensorsHeader (tensors: readonly Tensor[]): Buffer {
  return encodeHeader(
    tensors.map(({ name, dtype, shape }) => ({ name, dtype: TO_SAFETENSORS.get(dtype) ?? dtype, shape })),
    { format: 'pt' }
  )
}

export function copySideFiles (model: string, folder: string): void {
  for (const entry of readdirSync(model)) {
    const { size } = statSync(join(model, entry))
    const isSide = /\.(json|jinja|model|txt)$/.test(entry) && !entry.endsWith('.safetensors.index.json')
    if (isSide && size <= MAX_SIDE_FILE) copyFileSync(join(model, entry), join(folder, entry))
  }
}

function writeAll (fd: number, bytes: Buffer): void {
  for (let at = 0; at < bytes.length;) at += writeSync(fd, bytes, at, Math.min(bytes.length - at, 1 << 30))
}

/**
 * The same tensor with a distance at every element that depends on the variant, the name and the index. A swapped,
 * shifted or missing element is therefore never the right one by chance.
 */
function perturb ({ bytes, ...tensor }: Tensor, variant: VariantName): Tensor {
  return {
    ...tensor,
    bytes: () => {
      // Integers and quantised values stay: a changed bit could be an invalid value there.
      if (!isHeld(tensor.dtype)) return bytes()
      const values = readValues(tensor.dtype, bytes())
      const scale = DISTANCE * (rootMeanSquare(values) || 0.01)
      const key = createHash('sha256').update(`${variant}:${tensor.name}`).digest().readUInt32LE()
      for (let i = 0; i < values.length; i++) values[i]! += scale * signedUnit(key, i)
      return Buffer.from(writeValues(tensor.dtype, values).buffer)
    }
  }
}

function rootMeanSquare (values: Float32Array): number {
  let sum = 0
  for (const value of values) sum += value * value
  return Math.sqrt(sum / Math.max(values.length, 1))
}

/** A number in [-1, -0.5] or [0.5, 1] from a key and an index: the finaliser of MurmurHash3. */
function signedUnit (key: number, index: number): number {
  let h = (key ^ Math.imul(index + 1, 0x9e3779b1)) >>> 0
  h = Math.imul(h ^ (h >>> 16), 0x85ebca6b)
  h = Math.imul(h ^ (h >>> 13), 0xc2b2ae35)
  h = (h ^ (h >>> 16)) >>> 0
  const size = 0.5 + (h >>> 1) / 2 ** 32
  return (h & 1) === 0 ? size : -size
}
