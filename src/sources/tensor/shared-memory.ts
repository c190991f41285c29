import { closeSync, constants, existsSync, fstatSync, openSync, unlinkSync } from 'node:fs'
import type { Stats } from 'node:fs'
import { RefitError } from '../../errors.ts'
import { clip } from '../../wire/strict-json.ts'

// POSIX shared memory by name, as files of /dev/shm. Runs on the handle thread, because the calls block.

const FOLDER = '/dev/shm'

/**
 * Opens shared memory to read it and to release references to it. Only a regular file of this process's own user is
 * accepted. `name` is `/` and a plain file name (src/wire checks it). Throws TENSOR_PAYLOAD with advice.
 */
export function openSharedMemory (name: string): { fd: number, bytes: number } {
  const fd = attempt(name)
  try {
    const stats = fstatSync(fd)
    checkOwner(name, stats)
    return { fd, bytes: stats.size }
  } catch (error) {
    closeSync(fd)
    throw error
  }
}

/** False once it has been removed. */
export function isSharedMemory (name: string): boolean {
  return existsSync(FOLDER + name)
}

/** Never throws, because another process may have removed it. */
export function unlinkSharedMemory (name: string): void {
  try {
    unlinkSync(FOLDER + name)
  } catch {}
}

function attempt (name: string): number {
  try {
    // Not blocking: a FIFO of that name would wait for its other end.
    return openSync(FOLDER + name, constants.O_RDWR | constants.O_NOFOLLOW | constants.O_NONBLOCK)
  } catch (error) {
    throw refusal(name, (error as NodeJS.ErrnoException).code ?? 'it cannot be opened')
  }
}

function refusal (name: string, code: string): RefitError {
  const why = code === 'ENOENT'
    ? 'does not exist: the sender has ended or freed it, or it lives in another container ' +
      '(both need one /dev/shm: docker run --ipc=host)'
    : code === 'EACCES' || code === 'EPERM'
    ? 'belongs to another user: run the sender and refit as the same one'
    : code === 'EMFILE' || code === 'ENFILE'
    ? 'is one file too many for this process: raise ulimit -n, or send flattened buckets, which take one file each'
    : `cannot be opened (${code})`
  return new RefitError('TENSOR_PAYLOAD', `shared memory ${clip(name)} ${why}`)
}

function checkOwner (name: string, stats: Stats): void {
  if (!stats.isFile()) throw new RefitError('TENSOR_PAYLOAD', `shared memory ${clip(name)} is not a regular file`)
  if (stats.uid !== process.geteuid!()) {
    throw new RefitError(
      'TENSOR_PAYLOAD',
      `shared memory ${clip(name)} belongs to user ${stats.uid}, and refit runs as ${
        process.geteuid!()
      }: run both as the same user`
    )
  }
}
