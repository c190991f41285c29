import { createHash } from 'node:crypto'
import {
  chmodSync,
  closeSync,
  constants,
  copyFileSync,
  existsSync,
  fstatSync,
  mkdirSync,
  readdirSync,
  readSync,
  rmSync,
  statSync
} from 'node:fs'
import { availableParallelism } from 'node:os'
import { basename, join } from 'node:path'
import { RefitError } from '../errors.ts'
import { DELTA, DELTA_FIELDS } from '../native/deltas.ts'
import type { NativeAddon } from '../native/addon.ts'
import { headerLength, parseHeader, PREFIX_BYTES } from '../wire/safetensors/header.ts'
import type { SafetensorsHeader } from '../wire/safetensors/header.ts'
import { INDEX_NAME, SINGLE_NAME } from '../wire/safetensors/index.ts'
import { insideOf, openFile, readJson } from './files.ts'
import type { Contains } from './files.ts'

// A checkpoint on this host whose tensors are changed in place by the compressed changes that a trainer publishes. All
// calls block, so they run on threads of their own.

export type PatchAddon = Pick<NativeAddon, 'lockFile' | 'applyDeltas'>

/** The place of a tensor in a file; `end` is exclusive. */
export interface Place {
  path: string
  begin: number
  end: number
}

/** The compressed change of one tensor, between `begin` and `end` of the file that holds it. */
export interface Change {
  name: string
  begin: number
  end: number
  place: Place
  checksum: string
}

/** The result of a change; `bytes` counts the whole tensors. */
export interface Applied {
  tensors: number
  bytes: number
}

export function add (sum: Applied, { tensors, bytes }: Applied): void {
  sum.tensors += tensors
  sum.bytes += bytes
}

export const CHECKSUMS = ['xxh3-128', 'adler32', 'sha256'] as const
export type ChecksumName = typeof CHECKSUMS[number]
export interface Encoding {
  isXor: boolean
  checksum: ChecksumName
}

const MAX_THREADS = 32
/** Bytes of changes that are in memory at once. A larger change is a batch of its own. */
const BATCH_BYTES = 2 ** 28
const MAX_BATCH_BYTES = 2 ** 32 - 2 ** 16
const READ_BYTES = 2 ** 30
const SHOWN = 20

/** Changes tensors in a checkpoint's files. Call close() at the end. */
export class CheckpointPatch {
  readonly #addon: PatchAddon
  readonly #places = new Map<string, Place>()
  readonly #open = new Map<string, number>()
  readonly #folder: string

  constructor (folder: string, addon: PatchAddon) {
    this.#addon = addon
    this.#folder = folder
    for (const name of weightFiles(folder)) {
      const path = join(folder, name)
      for (const { name: tensor, begin, end } of readHeader(path).tensors) {
        const other = this.#places.get(tensor)
        if (other !== undefined) {
          throw new RefitError(
            'CHECKPOINT_FORMAT',
            `${path}: tensor "${tensor}" is in ${basename(other.path)} as well`,
            { param: tensor }
          )
        }
        this.#places.set(tensor, { path, begin, end })
      }
    }
  }

  /** Throws WEIGHTS_UNKNOWN_NAME. `file`: the file with the change, for the message. */
  place (name: string, file: string): Place {
    const place = this.#places.get(name)
    if (place === undefined) {
      throw new RefitError('WEIGHTS_UNKNOWN_NAME', `${file} changes "${name}", which ${this.#folder} does not have`, {
        param: name
      })
    }
    return place
  }

  /**
   * Applies the changes in `file`. Throws CHECKPOINT_FORMAT with the tensor's name, and CHECKPOINT_CHANGED if checksums
   * are wrong afterwards.
   */
  apply (file: string, changes: readonly Change[], encoding: Encoding): Applied {
    const wrong = [...batches(changes)].flatMap(batch => this.#applyBatch(file, batch, encoding))
    if (wrong.length === 0) {
      return {
        tensors: changes.length,
        bytes: changes.reduce((sum, { place }) => sum + place.end - place.begin, 0)
      }
    }
    throw new RefitError(
      'CHECKPOINT_CHANGED',
      `after ${file}, the checksums of ${wrong.length} tensors are not those that it announces: ${
        wrong.slice(0, SHOWN).join(', ')
      }. ${this.#folder} has no version now; the next pull makes it again from a whole checkpoint`
    )
  }

  close (): void {
    for (const fd of this.#open.values()) closeSync(fd)
    this.#open.clear()
  }

  #applyBatch (file: string, changes: readonly Change[], { isXor, checksum }: Encoding): string[] {
    const from = Math.min(...changes.map(({ begin }) => begin))
    const data = readPart(file, from, Math.max(...changes.map(({ end }) => end)))
    const table = new Float64Array(changes.length * DELTA_FIELDS)
    for (const [row, { begin, end, place }] of changes.entries()) {
      const at = row * DELTA_FIELDS
      table[at + DELTA.fd] = this.#descriptor(place.path)
      table[at + DELTA.offset] = place.begin
      table[at + DELTA.bytes] = place.end - place.begin
      table[at + DELTA.begin] = begin - from
      table[at + DELTA.end] = end - from
    }
    const sums = named(
      file,
      changes,
      () =>
        this.#addon.applyDeltas(
          data,
          table,
          isXor,
          checksum !== 'adler32',
          Math.min(MAX_THREADS, availableParallelism())
        )
    )
    const sum = (row: number): string => checksum === 'sha256' ? sha256(changes[row]!.place) : sums[row]!
    return changes.filter((change, row) => change.checksum.toLowerCase() !== sum(row)).map(({ name }) => name)
  }

  #descriptor (path: string): number {
    let fd = this.#open.get(path)
    if (fd === undefined) this.#open.set(path, fd = openFile(path, constants.O_RDWR))
    return fd
  }
}

/** Copies the files of a whole checkpoint, not its folders, and removes other files from the target. */
export function copyCheckpoint (from: string, to: string, contains: Contains): void {
  const files = checkpointFiles(from, contains)
  mkdirSync(to, { recursive: true })
  for (const entry of readdirSync(to, { withFileTypes: true })) {
    if (!entry.isDirectory() && !files.includes(entry.name)) rmSync(join(to, entry.name))
  }
  for (const name of files) {
    const source = insideOf(join(from, name), contains)
    // The files are changed later, so links of a Hugging Face cache become files, and all become writable.
    rmSync(join(to, name), { force: true })
    copyFileSync(source, join(to, name), constants.COPYFILE_FICLONE | constants.COPYFILE_EXCL)
    chmodSync(join(to, name), 0o644)
    if (statSync(source).size !== statSync(join(to, name)).size) {
      throw new RefitError('CHECKPOINT_CHANGED', `${join(from, name)} changed its size while it was copied`)
    }
  }
}

/**
 * The file of each tensor, from the index of a folder; null if there is no index. `contains`: the places to which the
 * index may be a link (default none). Throws CHECKPOINT_FORMAT or CHECKPOINT_PATH.
 */
export function readWeightMap (folder: string, contains?: Contains): Map<string, string> | null {
  const path = join(folder, INDEX_NAME)
  if (!existsSync(path)) return null
  const entries = Object.entries(readJson(contains === undefined ? path : insideOf(path, contains)).weight_map ?? {})
  const [wrong] = entries.find(([, file]) => typeof file !== 'string') ?? []
  if (wrong !== undefined) {
    throw new RefitError(
      'CHECKPOINT_FORMAT',
      `${path}: weight_map: the file of ${JSON.stringify(wrong.slice(0, 200))} must be a text`
    )
  }
  return new Map(entries as Array<[string, string]>)
}

/**
 * The files of the weights, chosen as findCheckpoint chooses the files to load. Other files are neither read nor
 * changed. Throws CHECKPOINT_FORMAT if one is missing.
 */
function weightFiles (folder: string, contains?: Contains): string[] {
  const all = readdirSync(folder).filter(name => name.endsWith('.safetensors') && !name.startsWith('.'))
  const named = new Set(readWeightMap(folder, contains)?.values())
  for (const name of named) {
    if (!all.includes(name)) {
      throw new RefitError('CHECKPOINT_FORMAT', `${folder} has no ${name}, which its ${INDEX_NAME} names`)
    }
  }
  return named.size > 0 ? [...named] : all.includes(SINGLE_NAME) ? [SINGLE_NAME] : all
}

/** The names of its files. Throws CHECKPOINT_FORMAT if weights are missing. */
function checkpointFiles (folder: string, contains: Contains): string[] {
  const files = readdirSync(folder).filter(name => statSync(join(folder, name)).isFile())
  if (weightFiles(folder, contains).length === 0) {
    throw new RefitError(
      'CHECKPOINT_FORMAT',
      `${folder} contains no safetensors file: it is no checkpoint to begin from`
    )
  }
  return files
}

export function readHeader (path: string): SafetensorsHeader {
  const fd = openFile(path)
  try {
    const { size } = fstatSync(fd)
    const prefix = Buffer.alloc(PREFIX_BYTES)
    readSync(fd, prefix, 0, PREFIX_BYTES, 0)
    const json = Buffer.alloc(headerLength(prefix, size, path))
    readSync(fd, json, 0, json.length, PREFIX_BYTES)
    return parseHeader(json, size, path)
  } finally {
    closeSync(fd)
  }
}

function* batches (changes: readonly Change[]): Generator<Change[]> {
  let batch: Change[] = []
  // Sorted by position, because a batch is read as one piece.
  for (const change of [...changes].sort((a, b) => a.begin - b.begin)) {
    if (batch.length > 0 && change.end - batch[0]!.begin > BATCH_BYTES) {
      yield batch
      batch = []
    }
    batch.push(change)
  }
  if (batch.length > 0) yield batch
}

function readPart (path: string, begin: number, end: number): Uint8Array {
  if (end - begin > MAX_BATCH_BYTES) {
    throw new RefitError(
      'UNSUPPORTED',
      `${path}: a change of ${end - begin} bytes; at most ${MAX_BATCH_BYTES} are supported`
    )
  }
  const data = Buffer.allocUnsafeSlow(end - begin)
  const fd = openFile(path)
  try {
    for (let done = 0; done < data.length;) {
      const part = readSync(fd, data, done, Math.min(READ_BYTES, data.length - done), begin + done)
      if (part === 0) throw new RefitError('CHECKPOINT_CHANGED', `${path} became shorter while it was read`)
      done += part
    }
  } finally {
    closeSync(fd)
  }
  return data
}

function sha256 ({ path, begin, end }: Place): string {
  const hash = createHash('sha256')
  for (let at = begin; at < end; at += BATCH_BYTES) hash.update(readPart(path, at, Math.min(end, at + BATCH_BYTES)))
  return hash.digest('hex')
}

function named (file: string, changes: readonly Change[], run: () => string[]): string[] {
  try {
    return run()
  } catch (error) {
    const [, row = '', why = ''] = /^(\d+): (.*)$/s.exec(error instanceof Error ? error.message : '') ?? []
    const name = changes[Number(row)]?.name
    if (row === '' || name === undefined) throw error
    throw new RefitError('CHECKPOINT_FORMAT', `${file}: tensor "${name}": ${why}`, { param: name, cause: error })
  }
}
