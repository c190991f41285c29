import type { BigIntStats } from 'node:fs'
import { stat } from 'node:fs/promises'
import type { FileHandle } from 'node:fs/promises'
import { setTimeout as sleep } from 'node:timers/promises'
import { RefitError } from '../../errors.ts'
import { native } from '../../native/load-addon.ts'
import type { PathJail } from './path-jail.ts'

// Kernels stamp files with a clock that ticks every 1 to 10 ms, so two writes within one tick leave the same mtime.
const TICK_MS = 20
const MAX_WAITS = 10
const IDENTITY = ['dev', 'ino', 'size', 'mtimeNs', 'ctimeNs'] as const

/** An open file and its state when it was opened, to detect later whether it was written to or replaced. */
export class WatchedFile {
  readonly label: string
  readonly size: number
  readonly #path: string
  readonly #handle: FileHandle
  readonly #opened: BigIntStats

  private constructor (path: string, label: string, handle: FileHandle, opened: BigIntStats) {
    this.#path = path
    this.label = label
    this.#handle = handle
    this.#opened = opened
    this.size = Number(opened.size)
  }

  /** Opens a file inside the jail. If it was written at this very moment, waits until the clock has moved on. */
  static async open (jail: PathJail, path: string, label: string): Promise<WatchedFile> {
    const handle = await jail.open(path, label)
    try {
      // Stores through a mapping that exists already move no time stamp.
      if (native().hasWriter(handle.fd)) {
        throw new RefitError(
          'CHECKPOINT_CHANGED',
          `${label} is open or mapped for writing and may change while it is read: close it, then send the update again`
        )
      }
      for (let wait = 0; wait < MAX_WAITS; wait++) {
        const opened = await handle.stat({ bigint: true })
        if (Math.abs(Date.now() - Number(opened.mtimeMs)) >= TICK_MS) {
          return new WatchedFile(path, label, handle, opened)
        }
        await sleep(TICK_MS)
      }
      throw changed(label, 'it is being written to right now')
    } catch (error) {
      await handle.close()
      throw error
    }
  }

  get fd (): number {
    return this.#handle.fd
  }

  /** Exactly `length` bytes from `offset`; the caller has checked them against `size`. */
  async read (offset: number, length: number): Promise<Buffer> {
    const buffer = Buffer.allocUnsafeSlow(length)
    for (let done = 0; done < length;) {
      const { bytesRead } = await this.#handle.read(buffer, done, length - done, offset + done)
      if (bytesRead === 0) throw changed(this.label, 'it became shorter')
      done += bytesRead
    }
    return buffer
  }

  /** Throws CHECKPOINT_CHANGED if the file or its path has changed. */
  async verify (): Promise<void> {
    const now = await this.#handle.stat({ bigint: true })
    const moved = IDENTITY.find(key => now[key] !== this.#opened[key])
    if (moved !== undefined) throw changed(this.label, `${moved} went from ${this.#opened[moved]} to ${now[moved]}`)
    const there = await stat(this.#path, { bigint: true }).catch(() => undefined)
    if (there?.ino !== this.#opened.ino || there.dev !== this.#opened.dev) {
      throw changed(this.label, 'its path now leads elsewhere')
    }
  }

  async close (): Promise<void> {
    await this.#handle.close()
  }
}

function changed (label: string, what: string): RefitError {
  return new RefitError(
    'CHECKPOINT_CHANGED',
    `${label} changed while it was read (${what}); send the update again when it is fully written`
  )
}
