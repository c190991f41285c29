import {
  closeSync,
  constants,
  fstatSync,
  fsyncSync,
  lstatSync,
  mkdirSync,
  openSync,
  readFileSync,
  readlinkSync,
  realpathSync,
  renameSync,
  rmSync,
  writeSync
} from 'node:fs'
import { basename, dirname, join } from 'node:path'
import { errorMessage, RefitError } from '../errors.ts'
import type { NativeAddon } from '../native/addon.ts'

// Files of published versions and of a local checkpoint. A folder that several users write to may contain anything:
// links that lead out of the roots, FIFOs, devices. Nothing here follows a link or waits for another process.

/** True if a real path may be read. */
export type Contains = (real: string) => boolean

const { O_CREAT, O_EXCL, O_NOFOLLOW, O_NONBLOCK, O_RDONLY, O_WRONLY } = constants
const LOCK_POLL_MS = 20

/** The real path of an existing file or folder. Throws CHECKPOINT_PATH. */
export function insideOf (path: string, contains: Contains): string {
  let real: string | undefined
  try {
    real = realpathSync(path)
  } catch {}
  if (real === undefined || !contains(real)) {
    throw new RefitError('CHECKPOINT_PATH', `${path} does not exist, or leads out of the allowed roots (--model-root)`)
  }
  return real
}

/**
 * Opens a regular file by its real path. Follows no link, and never waits for the other end of a FIFO, because a thread
 * that waits cannot be ended. Throws CHECKPOINT_PATH for a link, CHECKPOINT_FORMAT for what is no file.
 */
export function openFile (path: string, flags = O_RDONLY): number {
  let fd: number
  try {
    fd = openSync(path, flags | O_NOFOLLOW | O_NONBLOCK, 0o644)
  } catch (error) {
    const { code } = error as NodeJS.ErrnoException
    if (code === 'ELOOP') throw isLink(path)
    // A FIFO that nobody reads.
    if (code === 'ENXIO') throw notAFile(path)
    throw error
  }
  // A folder on the way may be a link, too.
  const refusal = !fstatSync(fd).isFile()
    ? notAFile(path)
    : readlinkSync(`/proc/self/fd/${fd}`) !== path
    ? isLink(path)
    : null
  if (refusal === null) return fd
  closeSync(fd)
  throw refusal
}

function isLink (path: string): RefitError {
  return new RefitError('CHECKPOINT_PATH', `${path} is, or lies behind, a symlink, which is not followed: remove it`)
}

function notAFile (path: string): RefitError {
  return new RefitError('CHECKPOINT_FORMAT', `${path} is not a regular file`)
}

/** Throws CHECKPOINT_PATH if the folder is a link. */
function requireFolder (path: string): void {
  if (!lstatSync(path).isDirectory()) throw isLink(path)
}

/** Reads a JSON object. Throws CHECKPOINT_FORMAT. */
export function readJson (path: string): Record<string, unknown> {
  const fd = openFile(path)
  try {
    const value: unknown = JSON.parse(readFileSync(fd, 'utf8'))
    if (typeof value === 'object' && value !== null && !Array.isArray(value)) return value as Record<string, unknown>
  } catch (error) {
    throw new RefitError(
      'CHECKPOINT_FORMAT',
      `${path} is not JSON: ${errorMessage(error)}`,
      { cause: error }
    )
  } finally {
    closeSync(fd)
  }
  throw new RefitError('CHECKPOINT_FORMAT', `${path} is JSON, but not an object`)
}

/** Writes the text atomically, also if the machine loses power. A link in its place is replaced and not followed. */
export function writeDurably (path: string, text: string): void {
  const folder = dirname(path)
  requireFolder(folder)
  const temporary = join(folder, `.${basename(path)}.tmp`)
  rmSync(temporary, { force: true })
  const fd = openFile(temporary, O_WRONLY | O_CREAT | O_EXCL)
  try {
    writeSync(fd, text)
    fsyncSync(fd)
  } finally {
    closeSync(fd)
  }
  renameSync(temporary, path)
}

/**
 * The id of this boot of the system. Changed files are not synced to the disk, which would take seconds. A state that
 * an earlier boot wrote may therefore describe bytes that were lost.
 */
export function bootId (): string {
  return readFileSync('/proc/sys/kernel/random/boot_id', 'utf8').trim()
}

/** Runs with an exclusive lock on a file, which other processes on this host respect. */
export function locked<T> (path: string, addon: Pick<NativeAddon, 'lockFile'>, run: () => T): T {
  mkdirSync(dirname(path), { recursive: true })
  requireFolder(dirname(path))
  const lock = openFile(path, O_WRONLY | O_CREAT)
  const cell = new Int32Array(new SharedArrayBuffer(4))
  try {
    // Sleep between tries: a thread that waits in a system call cannot be ended.
    while (!addon.lockFile(lock)) Atomics.wait(cell, 0, 0, LOCK_POLL_MS)
    return run()
  } finally {
    closeSync(lock)
  }
}
