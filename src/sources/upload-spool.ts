import { randomBytes } from 'node:crypto'
import { open, statfs, unlink } from 'node:fs/promises'
import type { FileHandle } from 'node:fs/promises'
import { join } from 'node:path'
import { RefitError } from '../errors.ts'
import { Lanes } from './lanes.ts'
import type { UploadSink } from './upload-sink.ts'
import type { Staging } from './upload-staging.ts'

// Of libuv's four threads: a slow disk never takes all of them.
const lanes = new Lanes(2)

/** Throws SPOOL_FAILED where the folder has no room for so many bytes. */
export async function checkRoom (folder: string, bytes: number): Promise<void> {
  const { bavail, bsize } = await statfs(folder).catch(error => { throw failed(folder, error) })
  if (bavail * bsize < bytes) throw noRoom(folder, `${bytes} bytes are to come, ${bavail * bsize} are free`)
}

/** A file without a name for what does not fit in memory: a process that ends in any way leaves nothing. */
export class Spool {
  readonly #folder: string
  readonly #file: FileHandle
  #end = 0
  #closing: Promise<void> | undefined

  private constructor (folder: string, file: FileHandle) {
    this.#folder = folder
    this.#file = file
  }

  static async open (folder: string): Promise<Spool> {
    const path = join(folder, `refit-upload-${process.pid}-${randomBytes(8).toString('hex')}`)
    const file = await open(path, 'wx+', 0o600).catch(error => { throw failed(folder, error) })
    try {
      await unlink(path)
    } catch (error) {
      await file.close()
      throw failed(folder, error)
    }
    return new Spool(folder, file)
  }

  get fd (): number { return this.#file.fd }

  /** Room for `bytes` behind what is there; where they begin, and what takes them. */
  async sink (bytes: number, staging: Staging): Promise<{ begin: number, sink: UploadSink }> {
    await checkRoom(this.#folder, bytes)
    const begin = this.#end
    this.#end += bytes
    return { begin, sink: new SpoolSink(this, begin, staging) }
  }

  async write (bytes: Uint8Array, position: number): Promise<void> {
    const leave = await lanes.enter()
    try {
      for (let done = 0; done < bytes.length;) {
        const { bytesWritten } = await this.#file.write(bytes, done, bytes.length - done, position + done)
        done += bytesWritten
      }
    } catch (error) {
      throw failed(this.#folder, error)
    } finally {
      leave()
    }
  }

  async close (): Promise<void> {
    this.#closing ??= this.#file.close()
    await this.#closing
  }
}

/** Collects bytes in two buffers in turn: one fills while the other is on its way to the disk. */
class SpoolSink implements UploadSink {
  readonly #spool: Spool
  readonly #staging: Staging
  readonly #slots: Buffer[] = []
  #turn = 0
  #filled = 0
  #position: number
  #writing: Promise<void> | undefined
  #failure: unknown

  constructor (spool: Spool, position: number, staging: Staging) {
    this.#spool = spool
    this.#position = position
    this.#staging = staging
    this.#slots.push(staging.take(staging.slotBytes))
    const second = staging.tryTake(staging.slotBytes)
    if (second !== undefined) this.#slots.push(second)
  }

  write (bytes: Uint8Array): Promise<void> | undefined {
    for (let at = 0; at < bytes.length;) {
      if (this.#failure !== undefined) throw this.#failure
      const slot = this.#slots[this.#turn]!
      const count = Math.min(this.#staging.slotBytes - this.#filled, bytes.length - at)
      slot.set(count === bytes.length ? bytes : bytes.subarray(at, at + count), this.#filled)
      at += count
      this.#filled += count
      if (this.#filled < this.#staging.slotBytes) continue
      if (this.#writing !== undefined) {
        const rest = bytes.subarray(at)
        return this.#writing.then(async () => {
          this.#flush()
          await this.#free()
          await this.write(rest)
        })
      }
      this.#flush()
      const free = this.#free()
      if (free !== undefined) return free.then(async () => await this.write(bytes.subarray(at)))
    }
    return undefined
  }

  async end (): Promise<void> {
    await this.#writing
    if (this.#failure === undefined && this.#filled > 0) this.#flush()
    await this.close()
    if (this.#failure !== undefined) throw this.#failure
  }

  async close (): Promise<void> {
    await this.#writing
    for (const slot of this.#slots.splice(0)) this.#staging.give(slot)
  }

  /** With one buffer alone, the bytes after it wait until it is written. */
  #free (): Promise<void> | undefined { return this.#slots.length === 1 ? this.#writing : undefined }

  #flush (): void {
    const bytes = this.#slots[this.#turn]!.subarray(0, this.#filled)
    this.#writing = this.#spool.write(bytes, this.#position).catch(error => { this.#failure ??= error }).then(() => { this.#writing = undefined })
    this.#position += this.#filled
    this.#turn = (this.#turn + 1) % this.#slots.length
    this.#filled = 0
  }
}

function failed (folder: string, error: unknown): RefitError {
  const { code = '', message } = error as NodeJS.ErrnoException
  if (code === 'ENOSPC' || code === 'EDQUOT') return noRoom(folder, `the disk is full, or its quota used up (${code})`)
  return new RefitError('SPOOL_FAILED', `the upload cannot be spooled to ${folder} (${code || message}): name another folder with --upload-folder. Nothing has changed`, { cause: error })
}

function noRoom (folder: string, what: string): RefitError {
  return new RefitError('SPOOL_FAILED', `${folder} has no room for the upload: ${what}. Send smaller parts, or mode=stream, or name another folder with --upload-folder. Nothing has changed`)
}
