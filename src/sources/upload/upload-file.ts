import { formatError, headerLength, PREFIX_BYTES } from '../../wire/safetensors/header.ts'
import type { SafetensorsTensor } from '../../wire/safetensors/header.ts'
import { parseTensors } from '../disk/safetensors-tensors.ts'
import type { UploadSink } from './upload-sink.ts'
import type { Staging } from './upload-staging.ts'

export interface UploadFileOptions {
  /** Names the file in messages. */
  label: string
  /** Null: unknown until the header has been read. */
  bytes: number | null
  staging: Staging
  /** Called with a header's length before it is read. It may refuse. */
  claim: (headerBytes: number) => void
  /** Called with the header's tensors. Returns the sink for the data. */
  place: (tensors: SafetensorsTensor[], dataStart: number, dataBytes: number) => Promise<UploadSink>
}

/** Parses one safetensors file while its bytes arrive: length, header, data, and nothing after it. */
export class UploadFile {
  readonly #options: UploadFileOptions
  readonly #prefix = Buffer.alloc(PREFIX_BYTES)
  #header: Buffer | undefined
  #headerBytes = 0
  /** Bytes of the prefix and the header so far. */
  #have = 0
  #sink: UploadSink | undefined
  /** Bytes of data still to come. */
  #left = 0
  #dataEnd = 0

  constructor (options: UploadFileOptions) {
    this.#options = options
  }

  /**
   * Takes all of `chunk`; returns a promise if the next one must wait. Throws, or rejects, as soon as the bytes cannot
   * be a valid file.
   */
  take (chunk: Uint8Array): Promise<void> | undefined {
    if (this.#sink === undefined) return this.#takeHead(chunk)
    if (chunk.length > this.#left) {
      throw formatError(
        this.#options.label,
        `its tensors end at byte ${this.#dataEnd}, but more bytes follow, which no tensor owns`
      )
    }
    this.#left -= chunk.length
    return this.#sink.write(chunk)
  }

  /** No more bytes will come. Throws CHECKPOINT_FORMAT if some are missing. */
  async end (): Promise<void> {
    const { label } = this.#options
    if (this.#sink === undefined) {
      const have = this.#have
      // With the bytes so far as the file's length it throws, unless the header is complete.
      headerLength(this.#prefix.subarray(0, Math.min(have, PREFIX_BYTES)), have, label)
    }
    if (this.#left > 0) {
      throw formatError(
        label,
        `its tensors end at byte ${this.#dataEnd}, but it has ${this.#dataEnd - this.#left}: it is cut off`
      )
    }
    await this.#sink?.end()
  }

  async close (): Promise<void> {
    this.#giveHeader()
    await this.#sink?.close()
  }

  #takeHead (chunk: Uint8Array): Promise<void> | undefined {
    const { label, bytes, staging, claim } = this.#options
    let at = 0
    if (this.#have < PREFIX_BYTES) {
      at = Math.min(PREFIX_BYTES - this.#have, chunk.length)
      this.#prefix.set(chunk.subarray(0, at), this.#have)
      this.#have += at
      if (this.#have < PREFIX_BYTES) return undefined
      this.#headerBytes = headerLength(this.#prefix, bytes ?? Infinity, label)
      claim(this.#headerBytes)
      this.#header = staging.take(this.#headerBytes)
    }
    const filled = this.#have - PREFIX_BYTES
    const count = Math.min(this.#headerBytes - filled, chunk.length - at)
    this.#header!.set(chunk.subarray(at, at + count), filled)
    this.#have += count
    if (filled + count < this.#headerBytes) return undefined
    return this.#open(chunk.subarray(at + count))
  }

  async #open (rest: Uint8Array): Promise<void> {
    const { label, bytes, place } = this.#options
    const tensors = await parseTensors(this.#header!.subarray(0, this.#headerBytes), bytes, label)
    this.#giveHeader()
    const dataStart = PREFIX_BYTES + this.#headerBytes
    this.#dataEnd = tensors.at(-1)?.end ?? dataStart
    this.#left = this.#dataEnd - dataStart
    this.#sink = await place(tensors, dataStart, this.#left)
    if (rest.length > 0) await this.take(rest)
  }

  #giveHeader (): void {
    if (this.#header !== undefined) this.#options.staging.give(this.#header)
    this.#header = undefined
  }
}
