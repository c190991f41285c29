import { PAGE_BYTES } from '../../native/host-memory.ts'
import { SpoolFile } from './spool-file.ts'
import { SpoolSink } from './spool-sink.ts'
import { SpoolSlots } from './spool-slots.ts'
import { SpoolStream } from './spool-stream.ts'
import type { UploadPart } from './spool-stream.ts'
import type { Staging } from './upload-staging.ts'

/** The part of an upload that does not fit in memory, on disk. */
export class Spool {
  readonly #file: SpoolFile
  readonly #slots: SpoolSlots
  #end = 0

  private constructor (file: SpoolFile, slots: SpoolSlots) {
    this.#file = file
    this.#slots = slots
  }

  /** Throws NO_MEMORY or SPOOL_FAILED. */
  static async open (folder: string, staging: Staging): Promise<Spool> {
    const slots = new SpoolSlots(staging)
    try {
      return new Spool(await SpoolFile.open(folder), slots)
    } catch (error) {
      slots.close()
      throw error
    }
  }

  /** Makes room for `bytes` after the present end; throws SPOOL_FAILED. One sink at a time. */
  async sink (bytes: number): Promise<SpoolSink> {
    const begin = this.#end
    const end = begin + Math.ceil(bytes / PAGE_BYTES) * PAGE_BYTES
    await this.#file.grow(begin, end)
    this.#end = end
    return new SpoolSink(this.#file, this.#slots, begin, bytes)
  }

  /** All parts of the upload, once the last sink has ended. */
  stream (parts: readonly UploadPart[]): SpoolStream {
    return new SpoolStream(this.#file, this.#slots, parts)
  }

  /** Closes after running reads and writes. */
  async close (): Promise<void> {
    await this.#file.close()
    this.#slots.close()
  }
}
