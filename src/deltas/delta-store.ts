import { createHash } from 'node:crypto'
import { closeSync, existsSync, readdirSync, readFileSync, rmSync } from 'node:fs'
import { join } from 'node:path'
import { RefitError } from '../errors.ts'
import { add, CheckpointPatch, copyCheckpoint, readHeader } from './checkpoint-patch.ts'
import type { Change, PatchAddon } from './checkpoint-patch.ts'
import { bootId, insideOf, locked, openFile, readJson, writeDurably } from './files.ts'
import type { Contains } from './files.ts'
import { readManifest } from './delta-manifest.ts'
import type { DeltaRecord } from './delta-manifest.ts'

// SkyRL's checkpoint deltas (weight_sync/delta_checkpoint.py). A trainer publishes a folder delta-00000007 for each
// version, with the changes since the previous version. Each host keeps one checkpoint up to date, in a folder
// `weights`. Folders, lock and state are those of SkyRL's own receiver, so either can continue the other's. All calls
// of fetchDeltas block, so it runs on a thread of its own.

export interface FetchRequest {
  /** `local_checkpoint_dir`. */
  localFolder: string
  /** The checkpoint that is version 0, and the trainer's name for it. */
  baseFolder: string
  baseName: string
  /** True if version 0 is the engine's own model. */
  isOwn: boolean
  targetVersion: number
  /** The folder in which versions are published; null: only `targetFolder` is known. */
  syncFolder: string | null
  /** The folder of the target version, if the request names it. */
  targetFolder: string | null
}

export interface Fetched {
  version: number
  tensors: number
  bytes: number
  seconds: { apply: number, reset: number }
}

/** `manifest_sha256` is refit's own: the digest of the version's manifest, or '' if it is unknown. */
interface State {
  version: number
  write_in_progress: boolean
  target_version: number | null
  base_model_path: string
  manifest_sha256: string
}

const SYNC = '.skyrl_weight_sync'
const LOCK = 'writer.lock'
const STATE = 'state.json'
const WEIGHTS = 'weights'
const MANIFEST = 'manifest.json'

/**
 * Updates a host's checkpoint to a version, under a lock of this host. Throws RefitError. If a change is interrupted,
 * the next fetch starts again from the base.
 */
export function fetchDeltas (request: FetchRequest, addon: PatchAddon, contains: Contains): Fetched {
  const { localFolder: local, targetVersion: target } = request
  return locked(join(local, SYNC, LOCK), addon, () => {
    const done: Fetched = { version: target, tensors: 0, bytes: 0, seconds: { apply: 0, reset: 0 } }
    const weights = join(local, WEIGHTS)
    const state = toState(existsSync(statePath(local)) ? readJson(statePath(local)) : {})
    // Without weights the checkpoint has no version, even if the state file has one.
    const isSound = !state.write_in_progress && state.base_model_path === request.baseName && existsSync(weights) &&
      isOfThisRun(request, state, contains)
    const before = isSound ? state.version : 0
    if (before > target) {
      throw new RefitError(
        'CONFLICT',
        `${local} is of version ${before}, and target_version ${target} is older: deltas do not lead back. ` +
          'For a new training run take another local_checkpoint_dir, or remove this one',
        { param: 'target_version' }
      )
    }
    const changing = (from: number, to: number, manifest: string, change: () => void): void => {
      writeState(local, {
        version: from,
        write_in_progress: true,
        target_version: target,
        base_model_path: request.baseName,
        manifest_sha256: ''
      })
      change()
      writeState(local, {
        version: to,
        write_in_progress: false,
        target_version: null,
        base_model_path: request.baseName,
        manifest_sha256: manifest
      })
    }
    if (!existsSync(statePath(local)) && existsSync(weights) && readdirSync(weights).length > 0) {
      throw new RefitError(
        'CHECKPOINT_PATH',
        `${weights} contains files that were not fetched: name an empty folder`,
        { param: 'local_checkpoint_dir' }
      )
    }
    if (!isSound) {
      done.seconds.reset = seconds(() => {
        changing(0, 0, '', () => {
          rmSync(weights, { recursive: true, force: true })
          // The engine's own model may lie outside of the roots.
          copyCheckpoint(request.baseFolder, weights, request.isOwn ? () => true : contains)
        })
      })
    }
    for (let version = before + 1; version <= target; version++) {
      done.seconds.apply += seconds(() => {
        const patch = new CheckpointPatch(weights, addon)
        try {
          // Check the whole delta before the first byte is changed.
          const folder = insideOf(deltaFolder(request, version), contains)
          const files = readDelta(folder, version, patch, contains)
          changing(version - 1, version, digestOf(insideOf(join(folder, MANIFEST), contains)), () => {
            for (const { file, checksum, changes } of files) {
              add(
                done,
                patch.apply(file, changes, { isXor: true, checksum })
              )
            }
          })
        } finally {
          patch.close()
        }
      })
    }
    return done
  })
}

/** The folder to load, if its checkpoint has that version. Throws CONFLICT. */
export async function fetchedFolder (local: string, version: number): Promise<string> {
  const state = stateOf(local)
  if (state === null || state.write_in_progress || state.version !== version) {
    const what = state === null
      ? 'nothing has been fetched'
      : state.write_in_progress
      ? `a fetch of version ${state.target_version} runs or has broken off`
      : `it is of version ${state.version}`
    throw new RefitError(
      'CONFLICT',
      `${local} is not ready to be loaded as version ${version}: ${what}. Call /fetch_weights first`,
      { param: 'target_version' }
    )
  }
  return join(local, WEIGHTS)
}

/** Null without a readable state. */
function stateOf (local: string): State | null {
  try {
    return toState(readJson(statePath(local)))
  } catch {
    return null
  }
}

interface FileChanges {
  file: string
  checksum: DeltaRecord['algorithm']
  changes: Change[]
}

function readDelta (folder: string, version: number, patch: CheckpointPatch, contains: Contains): FileChanges[] {
  const path = insideOf(join(folder, MANIFEST), contains)
  const manifest = readManifest(readJson(path), path)
  if (manifest.version !== version || manifest.base !== version - 1) {
    throw new RefitError(
      'CHECKPOINT_FORMAT',
      `${path} leads from version ${manifest.base} to ${manifest.version}, not from ${version - 1} to ${version}`
    )
  }
  const found = new Map<string, FileChanges>()
  const headers = new Map<string, Map<string, { begin: number, end: number, dtype: string }>>()
  for (const { name, bytes, file: base, key, checksum, algorithm } of manifest.records) {
    const file = insideOf(join(folder, base), contains)
    let entries = headers.get(file)
    if (entries === undefined) {
      headers.set(
        file,
        entries = new Map(
          readHeader(file)
            .tensors
            .map(tensor => [tensor.name, tensor])
        )
      )
    }
    const entry = entries.get(key)
    if (entry?.dtype !== 'U8') {
      throw new RefitError(
        'CHECKPOINT_FORMAT',
        `${file} has no tensor "${key}" of type U8, which should change "${name}"`,
        { param: name }
      )
    }
    const place = patch.place(name, file)
    if (place.end - place.begin !== bytes) {
      throw new RefitError(
        'CHECKPOINT_FORMAT',
        `${file} changes ${bytes} bytes of "${name}", which has ${
          place.end - place.begin
        }: the trainer began from another checkpoint`,
        { param: name }
      )
    }
    const group = `${algorithm} ${file}`
    const changes = found.get(group) ?? { file, checksum: algorithm, changes: [] }
    changes.changes.push({ name, begin: entry.begin, end: entry.end, place, checksum })
    found.set(group, changes)
  }
  return [...found.values()]
}

/** False if a later run has published other weights under the same version in the same folder. */
function isOfThisRun (request: FetchRequest, { version, manifest_sha256: known }: State, contains: Contains): boolean {
  if (known === '' || (request.syncFolder === null && version !== request.targetVersion)) return true
  const path = join(deltaFolder(request, version), MANIFEST)
  return !existsSync(path) || digestOf(insideOf(path, contains)) === known
}

function digestOf (path: string): string {
  const fd = openFile(path)
  try {
    return createHash('sha256').update(readFileSync(fd)).digest('hex')
  } finally {
    closeSync(fd)
  }
}

function deltaFolder ({ syncFolder, targetFolder, targetVersion }: FetchRequest, version: number): string {
  if (version === targetVersion && targetFolder !== null) return targetFolder
  if (syncFolder === null) {
    throw new RefitError(
      'INVALID_REQUEST',
      `sync_dir: is required, because version ${version} must be applied before ${targetVersion}`,
      { param: 'sync_dir' }
    )
  }
  return join(syncFolder, `delta-${String(version).padStart(8, '0')}`)
}

function statePath (local: string): string {
  return join(local, SYNC, STATE)
}

function toState (fields: Record<string, unknown>): State {
  const {
    version = 0,
    write_in_progress: isWriting = Object.keys(fields).length === 0,
    target_version: target = null,
    base_model_path: base = '',
    manifest_sha256: manifest = ''
  } = fields
  const isOld = fields.boot_id !== undefined && fields.boot_id !== bootId()
  const isKnown = !isOld && Number.isSafeInteger(version) && Number(version) >= 0 && typeof base === 'string'
  return {
    version: isKnown ? Number(version) : 0,
    write_in_progress: !isKnown || isWriting === true,
    target_version: typeof target === 'number' ? target : null,
    base_model_path: isKnown ? base : '',
    manifest_sha256: typeof manifest === 'string' ? manifest : ''
  }
}

function writeState (local: string, state: State): void {
  writeDurably(statePath(local), JSON.stringify({ ...state, boot_id: bootId() }))
}

function seconds (run: () => void): number {
  const from = performance.now()
  run()
  return (performance.now() - from) / 1000
}
