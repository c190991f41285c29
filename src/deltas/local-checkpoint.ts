import { existsSync, mkdirSync, readdirSync, rmSync } from 'node:fs'
import { join } from 'node:path'
import { RefitError } from '../errors.ts'
import { add, CheckpointPatch, copyCheckpoint, readHeader, readWeightMap } from './checkpoint-patch.ts'
import type { Applied, Encoding, PatchAddon } from './checkpoint-patch.ts'
import { bootId, insideOf, locked, readJson, writeDurably } from './files.ts'
import type { Contains } from './files.ts'
import { checkIndex } from '../sources/disk/safetensors-tensors.ts'
import { INDEX_NAME } from '../wire/safetensors/index.ts'

// slime's disk deltas (slime/utils/disk_delta.py and its pull_weights patch of SGLang). A trainer publishes a folder
// weight_v000007 for each version: a whole checkpoint, or the changes since the previous version. Each host keeps one
// checkpoint up to date. All calls block, so they run on a thread of their own.

export interface PullRequest {
  localFolder: string
  /** The checkpoint that is version 0. */
  baseFolder: string
  sourceFolder: string
  targetVersion: number
}

export interface Pulled {
  from: number | null
  version: number
  tensors: number
  bytes: number
}

interface DeltaIndex extends Encoding {
  version: number
  base: number
}

/** The names are SGLang's, so either can continue the other's checkpoint. */
const SYNC = '.weight_sync'
const LOCK = 'lock'
const STATE = 'state.json'
/**
 * refit's own: this file exists while others are being changed. A pull that finds it starts again from a whole
 * checkpoint.
 */
const CHANGING = 'changing'

/**
 * Updates a host's checkpoint to a version, under a lock of this host. Throws RefitError; the next pull repairs an
 * incomplete change.
 */
export function pullWeights (request: PullRequest, addon: PatchAddon, contains: Contains): Pulled {
  const { localFolder: local, baseFolder, sourceFolder, targetVersion: target } = request
  return locked(join(local, SYNC, LOCK), addon, () => {
    const applied = appliedVersion(local)
    const before = applied?.version ?? null
    const folder = (version: number): string => versionFolder(sourceFolder, version, contains)
    let start = target
    while (start > (before ?? 0) && readDelta(folder(start), contains) !== null) start--
    const done: Pulled = { from: before, version: target, tensors: 0, bytes: 0 }
    // Version 0 begins a training run, even if an earlier run has left its checkpoint or its own version 0.
    const isNewRun = target === 0 && before !== null && (before > 0 || (applied!.from ?? baseFolder) !== baseFolder)
    if (before === null || start > before || isNewRun) {
      // The engine's own model may lie outside of the roots.
      if (start === 0) resetTo(baseFolder, local, 0, () => true)
      else resetTo(folder(start), local, start, contains)
    } else {
      start = before
    }
    // Another process on this host has pulled a later version.
    if (before !== null && target > 0 && target < before) done.version = before
    for (let version = start + 1; version <= target; version++) {
      add(done, applyVersion(local, folder(version), version, addon, contains))
    }
    return done
  })
}

function versionFolder (source: string, version: number, contains: Contains): string {
  const folder = join(source, `weight_v${String(version).padStart(6, '0')}`)
  if (!existsSync(folder)) {
    throw new RefitError('CHECKPOINT_PATH', `the published weight version ${folder} does not exist`, {
      param: 'target_version'
    })
  }
  return insideOf(folder, contains)
}

/** Null for a whole checkpoint. */
function readDelta (folder: string, contains: Contains): DeltaIndex | null {
  if (!existsSync(join(folder, INDEX_NAME))) return null
  const path = insideOf(join(folder, INDEX_NAME), contains)
  const metadata = (readJson(path).metadata ?? {}) as Record<string, unknown>
  const { delta_encoding: encoding, compression_format: compression, checksum_format: checksum } = metadata
  if (encoding === undefined) return null
  const expect = (what: string, value: unknown, known: readonly string[]): void => {
    if (!known.includes(value as string)) {
      throw new RefitError(
        'UNSUPPORTED',
        `${path}: ${what} ${JSON.stringify(value)}; expected ${known.join(' or ')}`
      )
    }
  }
  expect('delta_encoding', encoding, ['xor', 'overwrite'])
  expect('compression_format', compression, ['zstd'])
  expect('checksum_format', checksum, ['xxh3-128', 'adler32'])
  return {
    version: Number(metadata.version),
    base: Number(metadata.base_version),
    isXor: encoding === 'xor',
    checksum: checksum as Encoding['checksum']
  }
}

/**
 * Null if there is no checkpoint, or a change of it was interrupted. `from`: the folder that it was copied from, if
 * known.
 */
function appliedVersion (local: string): { version: number, from?: unknown } | null {
  if (!existsSync(join(local, SYNC, STATE)) || existsSync(join(local, SYNC, CHANGING))) return null
  const { version: text, boot_id: boot, copied_from: from } = readJson(join(local, SYNC, STATE))
  if (boot !== undefined && boot !== bootId()) return null
  const version = Number(text)
  return Number.isSafeInteger(version) && version >= 0 ? { version, from } : null
}

/** Changes files. While it runs, and after it was interrupted, the checkpoint has no version. */
function changing (local: string, version: number, change: () => void, from?: string): void {
  const mark = join(local, SYNC, CHANGING)
  writeDurably(mark, String(version))
  change()
  writeDurably(
    join(local, SYNC, STATE),
    JSON.stringify({ version: String(version).padStart(6, '0'), boot_id: bootId(), copied_from: from })
  )
  rmSync(mark)
}

function resetTo (from: string, local: string, version: number, contains: Contains): void {
  mkdirSync(local, { recursive: true })
  // A mistyped path must not overwrite a checkpoint.
  const isOurs = [STATE, CHANGING].some(name => existsSync(join(local, SYNC, name)))
  if (!isOurs && readdirSync(local).some(name => name !== SYNC)) {
    throw new RefitError('CHECKPOINT_PATH', `${local} contains files that were not pulled: name an empty folder`, {
      param: 'local_checkpoint_dir'
    })
  }
  changing(local, version, () => {
    copyCheckpoint(from, local, contains)
  }, from)
}

function applyVersion (local: string, folder: string, version: number, addon: PatchAddon, contains: Contains): Applied {
  const delta = readDelta(folder, contains)!
  if (delta.version !== version || delta.base !== version - 1) {
    throw new RefitError(
      'CHECKPOINT_FORMAT',
      `${folder} leads from version ${delta.base} to ${delta.version}, not from ${version - 1} to ${version}`
    )
  }
  const sum = { tensors: 0, bytes: 0 }
  const patch = new CheckpointPatch(local, addon)
  try {
    // Check all names before the first byte is changed.
    const files = readdirSync(folder).filter(name => name.endsWith('.safetensors')).sort().map(name => {
      const file = insideOf(join(folder, name), contains)
      const { tensors, metadata } = readHeader(file)
      return {
        name,
        file,
        changes: tensors.map(({ name, begin, end }) => ({
          name,
          begin,
          end,
          place: patch.place(name, file),
          checksum: metadata.get(name) ?? ''
        }))
      }
    })
    // In a shared folder a file may appear later than the index that was written after it.
    const homes = new Map(files.flatMap(({ name: home, changes }) => changes.map(({ name }) => [name, home] as const)))
    const weightMap = readWeightMap(folder, contains)!
    checkIndex({ label: join(folder, INDEX_NAME), weightMap }, name => homes.get(name))
    changing(local, version, () => {
      for (const { file, changes } of files) add(sum, patch.apply(file, changes, delta))
    })
  } finally {
    patch.close()
  }
  return sum
}
