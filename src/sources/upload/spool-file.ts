import { randomBytes } from 'node:crypto'
import { constants, open, statfs, unlink } from 'node:fs/promises'
import type { FileHandle } from 'node:fs/promises'
import { join } from 'node:path'
import { RefitError } from '../../errors.ts'
import { Semaphore } from '../semaphore.ts'

// A slow disk takes at most two of libuv's four threads.
const semaphore = new Semaphore(2)
/** The weight of the last transfer in the moving average. */
const WEIGHT = 0.5

/** A write that bypasses the page cache, or one through it. */
export type Way = 'direct' | 'cached'

/** Throws SPOOL_FAILED if the folder has no room for so many bytes. */
export async function checkRoom (folder: string, bytes: number): Promise<void> {
  const { bavail, bsize } = await statfs(folder).catch(error => {
    throw failed(folder, error)
  })
  if (bavail * bsize < bytes) throw noRoom(folder, `${bytes} bytes are to come, ${bavail * bsize} are free`)
}

/**
 * A file for bytes that do not fit in memory. It has no name, so it disappears with the process. Each write uses the
 * way that has been faster: it bypasses the page cache if the disk is fast or memory is scarce, and goes through it if
 * the disk is slow and memory is plentiful.
 */
export class SpoolFile {
  readonly #folder: string
  readonly #cached: FileHandle
  /** Undefined if the file system does not support it. */
  #direct: FileHandle | undefined
  /** Bytes per millisecond; 0: not tried. */
  readonly #rates: Record<Way, number> = { direct: 0, cached: 0 }
  readonly #under = new Set<Promise<unknown>>()
  #closing: Promise<void> | undefined

  private constructor (folder: string, cached: FileHandle, direct: FileHandle | undefined) {
    this.#folder = folder
    this.#cached = cached
    this.#direct = direct
  }

  static async open (folder: string): Promise<SpoolFile> {
    const path = join(folder, `refit-upload-${process.pid}-${randomBytes(8).toString('hex')}`)
    const cached = await open(path, 'wx+', 0o600).catch(error => {
      throw failed(folder, error)
    })
    const direct = await open(path, constants.O_RDWR | constants.O_DIRECT).catch(() => undefined)
    try {
      await unlink(path)
    } catch (error) {
      await Promise.all([cached.close(), direct?.close()])
      throw failed(folder, error)
    }
    return new SpoolFile(folder, cached, direct)
  }

  /** Grows the file to so many bytes. Throws SPOOL_FAILED if there is no room for them. */
  async grow (from: number, to: number): Promise<void> {
    await checkRoom(this.#folder, to - from)
    // Writes beyond a file's end wait for each other, so the file is extended first.
    await this.#cached.truncate(to).catch(error => {
      throw failed(this.#folder, error)
    })
  }

  /** Writes whole pages of memory to whole pages of the file. Resolves to the way in which they must be read. */
  async write (bytes: Uint8Array, position: number): Promise<Way> {
    return await this.#run(async () => {
      const way = this.#faster()
      const start = performance.now()
      try {
        await transfer(
          bytes,
          position,
          async (done, at) => (await this.#handle(way).write(bytes, done, bytes.length - done, at)).bytesWritten
        )
      } catch (error) {
        if (way === 'cached' || (error as NodeJS.ErrnoException).code !== 'EINVAL') throw failed(this.#folder, error)
        // The file system needs larger blocks.
        this.#rates.direct = Number.MIN_VALUE
        await transfer(
          bytes,
          position,
          async (done, at) => (await this.#cached.write(bytes, done, bytes.length - done, at)).bytesWritten
        )
          .catch(error => {
            throw failed(this.#folder, error)
          })
        return 'cached'
      }
      const rate = bytes.length / Math.max(1e-3, performance.now() - start)
      this.#rates[way] = this.#rates[way] === 0 ? rate : WEIGHT * rate + (1 - WEIGHT) * this.#rates[way]
      return way
    })
  }

  /** Reads whole pages of memory that were written in that way. */
  async read (bytes: Uint8Array, position: number, way: Way): Promise<void> {
    await this.#run(async () => {
      await transfer(
        bytes,
        position,
        async (done, at) => (await this.#handle(way).read(bytes, done, bytes.length - done, at)).bytesRead
      )
    })
  }

  /** Closes after running reads and writes. */
  async close (): Promise<void> {
    this.#closing ??= (async () => {
      await Promise.allSettled(this.#under)
      await Promise.all([this.#cached.close(), this.#direct?.close()])
    })()
    await this.#closing
  }

  #handle (way: Way): FileHandle {
    return way === 'direct' ? this.#direct! : this.#cached
  }

  #faster (): Way {
    const { direct, cached } = this.#rates
    if (this.#direct === undefined) return 'cached'
    return direct === 0 || (cached !== 0 && direct >= cached) ? 'direct' : 'cached'
  }

  async #run<T> (work: () => Promise<T>): Promise<T> {
    const running = (async () => {
      const leave = await semaphore.enter()
      try {
        return await work()
      } finally {
        leave()
      }
    })()
    this.#under.add(running)
    try {
      return await running
    } finally {
      this.#under.delete(running)
    }
  }
}

async function transfer (
  bytes: Uint8Array,
  position: number,
  some: (done: number, at: number) => Promise<number>
): Promise<void> {
  for (let done = 0; done < bytes.length;) {
    const count = await some(done, position + done)
    if (count === 0) throw new Error(`the spooled upload ends at byte ${position + done}`)
    done += count
  }
}

function failed (folder: string, error: unknown): RefitError {
  const { code = '', message } = error as NodeJS.ErrnoException
  if (code === 'ENOSPC' || code === 'EDQUOT') return noRoom(folder, `the disk is full, or its quota used up (${code})`)
  return new RefitError(
    'SPOOL_FAILED',
    `the upload cannot be spooled to ${folder} (${
      code || message
    }): name another folder with --upload-folder. Nothing has changed`,
    { cause: error }
  )
}

function noRoom (folder: string, what: string): RefitError {
  return new RefitError(
    'SPOOL_FAILED',
    `${folder} has no room for the upload: ${what}. Send smaller parts, or mode=stream, ` +
      'or name another folder with --upload-folder. Nothing has changed'
  )
}
