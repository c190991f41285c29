import { constants } from 'node:fs'
import { lstat, open, readlink, realpath } from 'node:fs/promises'
import type { FileHandle } from 'node:fs/promises'
import { resolve, sep } from 'node:path'
import { RefitError } from '../../errors.ts'

const { O_RDONLY, O_NOFOLLOW, O_NONBLOCK } = constants

/**
 * One message for a path that does not exist and for one that may not be read, so that replies reveal nothing about the
 * disk outside the roots.
 */
export function outside (path: string): RefitError {
  return new RefitError(
    'CHECKPOINT_PATH',
    `${JSON.stringify(path)} is not there, or not inside the allowed roots (--model-root)`,
    { param: 'model_path' }
  )
}

/** Accepts only paths that lie inside one of its roots after every symlink has been followed. */
export class PathJail {
  readonly #roots: string[]

  private constructor (roots: string[]) {
    this.#roots = roots
  }

  /** Roots that do not exist are skipped. */
  static async of (roots: readonly string[]): Promise<PathJail> {
    const found = await Promise.all(roots.map(async root => await realpath(root).catch(() => undefined)))
    return new PathJail(found.filter(root => root !== undefined))
  }

  contains (real: string): boolean {
    return this.#roots.some(root => real === root || real.startsWith(root.endsWith(sep) ? root : root + sep))
  }

  /** The real path of `path` (relative ones count from the working directory). Throws CHECKPOINT_PATH. */
  async resolve (path: string): Promise<string> {
    if (path === '' || path.includes('\0')) throw outside(path)
    const real = await realpath(resolve(path)).catch(() => undefined)
    if (real === undefined || !this.contains(real)) throw outside(path)
    return real
  }

  /**
   * Opens a regular file for reading; `label` names it in errors. It never waits for a FIFO's writer, and a symlink
   * that is swapped in late leads nowhere.
   */
  async open (path: string, label = path): Promise<FileHandle> {
    const real = await this.resolve(path).catch(() => {
      throw outside(label)
    })
    // Checked before it is opened, because opening a device can have effects. The checks on the open file are the ones
    // that decide.
    const early = await lstat(real).catch(() => {
      throw outside(label)
    })
    if (!early.isFile()) throw notAFile(label)
    let handle: FileHandle
    try {
      handle = await open(real, O_RDONLY | O_NOFOLLOW | O_NONBLOCK)
    } catch (error) {
      throw unopened(label, error as NodeJS.ErrnoException)
    }
    try {
      if (!(await handle.stat()).isFile()) throw notAFile(label)
      // A folder on the way may have been swapped since realpath, so the path of the open file decides.
      const opened = await readlink(`/proc/self/fd/${handle.fd}`).catch(() => undefined)
      if (opened === undefined || !this.contains(opened)) throw outside(label)
    } catch (error) {
      await handle.close()
      throw error
    }
    return handle
  }
}

function unopened (label: string, cause: NodeJS.ErrnoException): RefitError {
  if (cause.code === 'EMFILE' || cause.code === 'ENFILE') {
    const message =
      `${label} cannot be opened: this process has as many files and connections open as it may (ulimit -n)`
    return new RefitError('NO_MEMORY', message, { cause })
  }
  return new RefitError('CHECKPOINT_PATH', `${label} cannot be opened (${cause.code})`, { param: 'model_path', cause })
}

function notAFile (label: string): RefitError {
  return new RefitError('CHECKPOINT_PATH', `${label} is not a regular file`, { param: 'model_path' })
}
