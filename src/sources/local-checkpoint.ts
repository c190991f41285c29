import { closeSync, copyFileSync, existsSync, fsyncSync, mkdirSync, openSync, readdirSync, readFileSync, readSync, renameSync, rmSync, statSync, writeSync } from 'node:fs'
import { availableParallelism } from 'node:os'
import { join } from 'node:path'
import { RefitError } from '../errors.ts'
import { DELTA_FIELDS } from '../native.ts'
import type { NativeAddon } from '../native.ts'
import { headerLength, parseHeader, PREFIX_BYTES } from '../wire/safetensors.ts'
import type { SafetensorsHeader } from '../wire/safetensors.ts'

// slime's disk deltas (slime/utils/disk_delta.py and its pull_weights patch of SGLang): a trainer publishes a folder weight_v000007 for each
// version, a whole checkpoint or what has changed since the version before, and each host keeps one checkpoint of its own up to date.
// Runs on a thread of its own: all calls block.

export interface PullRequest {
  localFolder: string
  /** What version 0 is. */
  baseFolder: string
  sourceFolder: string
  targetVersion: number
}

export interface Pulled { from: number | null, version: number, tensors: number, bytes: number }

interface DeltaIndex { version: number, base: number, isXor: boolean, isXxh3: boolean }

const INDEX = 'model.safetensors.index.json'
/** As SGLang has it, so that either finds the other's. */
const SYNC = '.weight_sync'
const LOCK = 'lock'
const STATE = 'state.json'
/** refit's own: it is there while files are being changed. A pull that finds it begins anew from a whole checkpoint. */
const CHANGING = 'changing'
const MAX_THREADS = 32
const SHOWN = 20

/** Brings a host's checkpoint to a version, as the only one on this host at a time. Throws RefitError; then the next pull mends what is half done. */
export function pullWeights (request: PullRequest, addon: Pick<NativeAddon, 'lockFile' | 'applyDeltas'>): Pulled {
  const { localFolder: local, baseFolder, sourceFolder, targetVersion: target } = request
  mkdirSync(join(local, SYNC), { recursive: true })
  const lock = openSync(join(local, SYNC, LOCK), 'w')
  try {
    addon.lockFile(lock)
    const before = appliedVersion(local)
    let start = target
    while (start > (before ?? 0) && readDelta(versionFolder(sourceFolder, start)) !== null) start--
    const done: Pulled = { from: before, version: target, tensors: 0, bytes: 0 }
    if (before === null || start > before) resetTo(start === 0 ? baseFolder : versionFolder(sourceFolder, start), local, start)
    else start = before
    if (before !== null && target < before) done.version = before
    for (let version = start + 1; version <= target; version++) {
      const applied = applyVersion(local, versionFolder(sourceFolder, version), version, addon)
      done.tensors += applied.tensors
      done.bytes += applied.bytes
    }
    return done
  } finally {
    closeSync(lock)
  }
}

function versionFolder (source: string, version: number): string {
  return join(source, `weight_v${String(version).padStart(6, '0')}`)
}

/** Null for a whole checkpoint. */
function readDelta (folder: string): DeltaIndex | null {
  if (!existsSync(folder)) throw new RefitError('CHECKPOINT_PATH', `the published weight version ${folder} is not there`, { param: 'target_version' })
  const path = join(folder, INDEX)
  if (!existsSync(path)) return null
  const { metadata = {} } = readJson(path) as { metadata?: Record<string, unknown> }
  const { delta_encoding: encoding, compression_format: compression, checksum_format: checksum } = metadata
  if (encoding === undefined) return null
  const expect = (what: string, value: unknown, known: readonly string[]): void => {
    if (!known.includes(value as string)) throw new RefitError('UNSUPPORTED', `${path}: ${what} ${JSON.stringify(value)}; expected ${known.join(' or ')}`)
  }
  expect('delta_encoding', encoding, ['xor', 'overwrite'])
  expect('compression_format', compression, ['zstd'])
  expect('checksum_format', checksum, ['xxh3-128', 'adler32'])
  return { version: Number(metadata.version), base: Number(metadata.base_version), isXor: encoding === 'xor', isXxh3: checksum === 'xxh3-128' }
}

/** Null where there is none, or a change of it broke off. */
function appliedVersion (local: string): number | null {
  if (!existsSync(join(local, SYNC, STATE)) || existsSync(join(local, SYNC, CHANGING))) return null
  const version = Number((readJson(join(local, SYNC, STATE)) as { version?: unknown }).version)
  return Number.isSafeInteger(version) && version >= 0 ? version : null
}

/** A change of files. While it is under way, and after it has broken off, they are of no version. */
function changing (local: string, version: number, change: () => void): void {
  const mark = join(local, SYNC, CHANGING)
  writeDurably(mark, String(version))
  change()
  writeDurably(join(local, SYNC, STATE), JSON.stringify({ version: String(version).padStart(6, '0') }))
  rmSync(mark)
}

/** An exact copy of a whole checkpoint. */
function resetTo (from: string, local: string, version: number): void {
  const files = readdirSync(from).filter(name => statSync(join(from, name)).isFile())
  if (!files.some(name => name.endsWith('.safetensors'))) throw new RefitError('CHECKPOINT_FORMAT', `${from} holds no safetensors, and version ${version} begins from it`)
  changing(local, version, () => {
    for (const entry of readdirSync(local, { withFileTypes: true })) if (entry.isFile() && !files.includes(entry.name)) rmSync(join(local, entry.name))
    for (const name of files) {
      // Links of a Hugging Face cache become files: they are changed later.
      rmSync(join(local, name), { force: true })
      copyFileSync(join(from, name), join(local, name))
      if (statSync(join(from, name)).size !== statSync(join(local, name)).size) throw new RefitError('CHECKPOINT_CHANGED', `${join(from, name)} changed its size while it was copied`)
    }
  })
}

function applyVersion (local: string, folder: string, version: number, addon: Pick<NativeAddon, 'applyDeltas'>): { tensors: number, bytes: number } {
  const delta = readDelta(folder)!
  if (delta.version !== version || delta.base !== version - 1) throw new RefitError('CHECKPOINT_FORMAT', `${folder} says that it leads from version ${delta.base} to ${delta.version}, not from ${version - 1} to ${version}`)
  const places = placesOf(local)
  const open = new Map<string, number>()
  const sum = { tensors: 0, bytes: 0 }
  try {
    changing(local, version, () => {
      for (const name of readdirSync(folder).filter(name => name.endsWith('.safetensors')).sort()) {
        const file = join(folder, name)
        const { tensors, metadata } = readHeader(file)
        const table = new Float64Array(tensors.length * DELTA_FIELDS)
        for (const [row, tensor] of tensors.entries()) {
          const place = places.get(tensor.name)
          if (place === undefined) throw new RefitError('WEIGHTS_UNKNOWN_NAME', `${file} changes "${tensor.name}", which ${local} does not have`, { param: tensor.name })
          let fd = open.get(place.path)
          if (fd === undefined) open.set(place.path, fd = openSync(place.path, 'r+'))
          table.set([fd, place.begin, place.end - place.begin, tensor.begin, tensor.end], row * DELTA_FIELDS)
          sum.bytes += place.end - place.begin
        }
        const sums = apply(file, tensors.map(tensor => tensor.name), () => addon.applyDeltas(readFileSync(file), table, delta.isXor, delta.isXxh3, Math.min(MAX_THREADS, availableParallelism())))
        const wrong = tensors.filter((tensor, row) => metadata.get(tensor.name)?.toLowerCase() !== sums[row])
        if (wrong.length > 0) throw new RefitError('CHECKPOINT_CHANGED', `after ${file}, the checksums of ${wrong.length} tensors are not what it says: ${wrong.slice(0, SHOWN).map(tensor => tensor.name).join(', ')}. ${local} is of no version now; the next pull makes it anew`)
        sum.tensors += tensors.length
      }
    })
  } finally {
    for (const fd of open.values()) closeSync(fd)
  }
  return sum
}

function apply (file: string, names: readonly string[], run: () => string[]): string[] {
  try {
    return run()
  } catch (error) {
    const [, row = '', why = ''] = /^(\d+): (.*)$/s.exec(error instanceof Error ? error.message : '') ?? []
    const name = names[Number(row)]
    if (row === '' || name === undefined) throw error
    throw new RefitError('CHECKPOINT_FORMAT', `${file}: tensor "${name}": ${why}`, { param: name, cause: error })
  }
}

function placesOf (local: string): Map<string, { path: string, begin: number, end: number }> {
  const places = new Map<string, { path: string, begin: number, end: number }>()
  for (const name of readdirSync(local).filter(name => name.endsWith('.safetensors'))) {
    const path = join(local, name)
    for (const { name: tensor, begin, end } of readHeader(path).tensors) places.set(tensor, { path, begin, end })
  }
  return places
}

function readHeader (path: string): SafetensorsHeader {
  const fd = openSync(path, 'r')
  try {
    const { size } = statSync(path)
    const prefix = Buffer.alloc(PREFIX_BYTES)
    readSync(fd, prefix, 0, PREFIX_BYTES, 0)
    const json = Buffer.alloc(headerLength(prefix, size, path))
    readSync(fd, json, 0, json.length, PREFIX_BYTES)
    return parseHeader(json, size, path)
  } finally {
    closeSync(fd)
  }
}

function readJson (path: string): unknown {
  try {
    return JSON.parse(readFileSync(path, 'utf8'))
  } catch (error) {
    throw new RefitError('CHECKPOINT_FORMAT', `${path} is not JSON: ${error instanceof Error ? error.message : String(error)}`, { cause: error })
  }
}

/** Whole or not at all, also after the machine has lost its power. */
function writeDurably (path: string, text: string): void {
  const fd = openSync(`${path}.tmp`, 'w')
  try {
    writeSync(fd, text)
    fsyncSync(fd)
  } finally {
    closeSync(fd)
  }
  renameSync(`${path}.tmp`, path)
}
