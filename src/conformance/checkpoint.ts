import { closeSync, existsSync, openSync, readFileSync, readSync, statSync } from 'node:fs'
import { join } from 'node:path'
import { RefitError } from '../errors.ts'
import { ELEMENTS } from '../native/dtypes.ts'
import type { ElementType } from '../native/dtypes.ts'
import { headerLength, parseHeader, PREFIX_BYTES } from '../wire/safetensors/header.ts'
import { INDEX_NAME, parseIndex, SINGLE_NAME } from '../wire/safetensors/index.ts'

/** A tensor as a trainer has it. */
export interface Tensor {
  name: string
  /** torch's name, or any other text for a lie. */
  dtype: string
  shape: number[]
  bytes: () => Buffer
}

export const TO_SAFETENSORS: ReadonlyMap<string, string> = new Map(
  ELEMENTS.flatMap(([name, { safetensors }]) => safetensors === undefined ? [] : [[name, safetensors] as const])
)
const TO_TORCH: ReadonlyMap<string, string> = new Map([...TO_SAFETENSORS].map(([torch, name]) => [name, torch]))
const ITEM_BYTES: ReadonlyMap<string, number> = new Map(ELEMENTS.map(([name, { bytes }]) => [name, bytes]))

/** Bytes of one element; undefined for a dtype that torch does not have. */
export function itemBytes (dtype: ElementType | string): number | undefined {
  return ITEM_BYTES.get(dtype)
}

/** The tensors of a folder of safetensors files, in the order of the files. Their bytes are read on demand. */
export function readCheckpoint (folder: string): Tensor[] {
  return listFiles(folder).flatMap(file => readFile(join(folder, file), file))
}

/** The safetensors files of a checkpoint. Throws CHECKPOINT_PATH if there are none. */
export function listFiles (folder: string): string[] {
  const index = join(folder, INDEX_NAME)
  if (existsSync(index)) return parseIndex(readFileSync(index), index).files
  if (existsSync(join(folder, SINGLE_NAME))) return [SINGLE_NAME]
  throw new RefitError('CHECKPOINT_PATH', `${folder} has neither ${SINGLE_NAME} nor ${INDEX_NAME}`, { param: 'model' })
}

function readFile (path: string, file: string): Tensor[] {
  const fd = openSync(path, 'r')
  try {
    const prefix = readAt(fd, 0, PREFIX_BYTES)
    const length = headerLength(prefix, Number.MAX_SAFE_INTEGER, file)
    const header = parseHeader(readAt(fd, PREFIX_BYTES, length), statSync(path).size, file)
    return header.tensors.map(({ name, dtype, shape, begin, end }) => ({
      name,
      dtype: TO_TORCH.get(dtype) ?? dtype,
      shape,
      bytes: () => readPath(path, begin, end - begin)
    }))
  } finally {
    closeSync(fd)
  }
}

function readPath (path: string, offset: number, bytes: number): Buffer {
  const fd = openSync(path, 'r')
  try {
    return readAt(fd, offset, bytes)
  } finally {
    closeSync(fd)
  }
}

/** Reads in pieces, because one read ends at 2 GiB. */
function readAt (fd: number, offset: number, bytes: number): Buffer {
  const out = Buffer.allocUnsafe(bytes)
  for (let at = 0; at < bytes;) {
    const read = readSync(fd, out, at, Math.min(bytes - at, 1 << 30), offset + at)
    if (read === 0) throw new RefitError('CHECKPOINT_CHANGED', `a checkpoint ended after ${offset + at} bytes`)
    at += read
  }
  return out
}
