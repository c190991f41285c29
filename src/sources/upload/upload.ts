import { setImmediate as breathe } from 'node:timers/promises'
import { RefitError } from '../../errors.ts'
import { formatError, MAX_HEADER_BYTES, MAX_TENSORS } from '../../wire/safetensors/header.ts'
import type { SafetensorsTensor } from '../../wire/safetensors/header.ts'
import { parseIndexInSlices } from '../../wire/safetensors/index.ts'
import type { AnnouncedTensor, WeightSource } from '../../contract/weight-source.ts'
import { announce, checkIndex, inSlices } from '../disk/safetensors-tensors.ts'
import { Spool } from './spool.ts'
import type { UploadPart } from './spool-stream.ts'
import { UPLOAD } from './transport.ts'
import { UploadFile } from './upload-file.ts'
import { HeldSink } from './upload-sink.ts'
import type { UploadSink } from './upload-sink.ts'
import type { Staging } from './upload-staging.ts'
import { UploadStream } from './upload-stream.ts'

const TENSORS_PER_SLICE = 8192

export interface UploadOptions {
  staging: Staging
  /** The folder for data that does not fit in memory. */
  folder: string
  /** True if bytes are written as they arrive. Called when a file begins. */
  isStream: () => boolean
  /** Longest time without a byte from the client. */
  stallMs: number
  /** Most bytes of tensors. */
  maxBytes: number
}

/** The place where the bytes wait, or waited, for the write. */
export type UploadPlace = 'memory' | 'disk' | 'stream'

/**
 * Safetensors files that are sent as one update. For each file: begin it, pass its bytes, end it. Then call `finish`.
 * The engine does not change before the source is written. Close the source, or the upload if there is no source.
 */
export class Upload {
  /** Bytes of the tensors. */
  bytes = 0
  place: UploadPlace = 'memory'
  readonly #options: UploadOptions
  readonly #tensors: AnnouncedTensor[] = []
  /** The data of each file. */
  readonly #parts: UploadPart[] = []
  /** The file of each tensor. */
  readonly #homes = new Map<string, string>()
  readonly #held: Buffer[] = []
  readonly #files: { label: string, file: UploadFile }[] = []
  #headerBytes = 0
  #spool: Spool | undefined
  #stream: UploadStream | undefined
  #open!: (source: WeightSource) => void
  /** For an upload that is written as it comes: its source, once its header has been read. */
  readonly opened = new Promise<WeightSource>(resolve => {
    this.#open = resolve
  })
  #closing: Promise<void> | undefined

  constructor (options: UploadOptions) {
    this.#options = options
  }

  /** The number of files that have begun. */
  get files (): number {
    return this.#files.length
  }

  /** `bytes`: its length, if that is known beforehand. */
  begin (label: string, bytes: number | null): UploadFile {
    if (this.#options.isStream() && this.#files.length > 0) {
      throw new RefitError(
        'UNSUPPORTED',
        `${label} is a second file: with mode=stream a request has one, ` +
          'since all of its tensors are checked before the first is written. ' +
          'Leave mode out, or send one request per file',
        { param: 'mode' }
      )
    }
    if (this.#files.some(file => file.label === label)) throw formatError(label, 'was sent twice')
    const file = new UploadFile({
      label,
      bytes,
      staging: this.#options.staging,
      claim: headerBytes => {
        this.#headerBytes += headerBytes
        if (this.#headerBytes > MAX_HEADER_BYTES) {
          throw formatError(label, `with it the headers of this upload pass ${MAX_HEADER_BYTES} bytes`)
        }
      },
      place: async (tensors, dataStart, dataBytes) => await this.#place(label, tensors, dataStart, dataBytes)
    })
    this.#files.push({ label, file })
    return file
  }

  /** All files have come. `index`: the JSON of their index, if there was one. */
  async finish (index?: { label: string, json: Uint8Array }): Promise<WeightSource> {
    if (this.#files.length === 0) throw new RefitError('BODY_BROKEN', 'the upload has no file')
    this.#requireTensors()
    if (index !== undefined) {
      const { weightMap } = await inSlices(parseIndexInSlices(index.json, index.label))
      checkIndex({ label: index.label, weightMap }, name => this.#homes.get(name))
    }
    this.#stream?.finish()
    return this.#stream === undefined ? this.#source() : await this.opened
  }

  /** The body broke off, or is not valid. */
  fail (error: unknown): void {
    this.#stream?.fail(error)
  }

  async close (): Promise<void> {
    this.#closing ??= this.#close()
    await this.#closing
  }

  async #place (
    label: string,
    tensors: SafetensorsTensor[],
    dataStart: number,
    dataBytes: number
  ): Promise<UploadSink> {
    const { staging, folder, isStream, maxBytes, stallMs } = this.#options
    this.bytes += dataBytes
    if (this.bytes > maxBytes) {
      throw new RefitError(
        'BODY_TOO_LARGE',
        `${label}: with it the tensors of this upload take ${this.bytes} bytes, ` +
          `several times what the model does (at most ${maxBytes})`
      )
    }
    // Dtypes are checked before memory is taken or a file is made.
    const announced: AnnouncedTensor[] = []
    for (const tensor of tensors) {
      const home = this.#homes.get(tensor.name)
      if (home !== undefined) throw formatError(label, `is in ${home} as well`, tensor.name)
      this.#homes.set(tensor.name, label)
      announced.push(announce(tensor, this.#parts.length, label, -dataStart))
      // A header may list hundreds of thousands.
      if (announced.length % TENSORS_PER_SLICE === 0) await breathe()
    }
    if (this.#homes.size > MAX_TENSORS) {
      throw formatError(label, `with it this upload has more than ${MAX_TENSORS} tensors`)
    }
    if (isStream()) this.#requireTensors()
    for (const tensor of announced) this.#tensors.push(tensor)
    if (isStream()) {
      this.place = 'stream'
      const stream = this.#stream = new UploadStream(staging, stallMs)
      this.#open({
        kind: 'streamed',
        transport: UPLOAD,
        tensors: this.#tensors,
        stream,
        verify: async () => {
          stream.verify()
        },
        close: async () => {
          await stream.close()
        }
      })
      return stream
    }
    const buffer = staging.tryHold(dataBytes)
    if (buffer !== undefined) {
      this.#held.push(buffer)
      this.#parts.push({ buffer: buffer.subarray(0, dataBytes) })
      return new HeldSink(buffer)
    }
    this.place = 'disk'
    this.#spool ??= await Spool.open(folder, staging)
    const sink = await this.#spool.sink(dataBytes)
    this.#parts.push(sink.part)
    return sink
  }

  #requireTensors (): void {
    if (this.#homes.size > 0) return
    const files = this.#files.map(({ label }) => label).join(', ').slice(0, 500)
    throw new RefitError('WEIGHTS_INCOMPLETE', `the upload contains no tensor (${files}). Nothing has changed`)
  }

  /** The source of a complete upload, whose bytes only this process has. */
  #source (): WeightSource {
    const ends = {
      verify: async () => {},
      close: async () => {
        await this.close()
      }
    }
    if (this.#spool === undefined) {
      return {
        kind: 'stored',
        transport: UPLOAD,
        tensors: this.#tensors,
        sources: this.#parts.filter(part => 'buffer' in part),
        ...ends
      }
    }
    const begins = this.#parts.map(() => 0)
    for (const [index, part] of this.#parts.slice(0, -1).entries()) {
      begins[index + 1] = begins[index]! + ('buffer' in part ? part.buffer.length : part.bytes)
    }
    const tensors = this.#tensors.map(tensor => ({
      ...tensor,
      source: 0,
      offset: begins[tensor.source]! + tensor.offset
    }))
    return { kind: 'streamed', transport: UPLOAD, tensors, stream: this.#spool.stream(this.#parts), ...ends }
  }

  async #close (): Promise<void> {
    // Bytes on their way to the disk arrive before the file closes.
    for (const { file } of this.#files) await file.close()
    await this.#spool?.close()
    for (const buffer of this.#held.splice(0)) this.#options.staging.give(buffer)
  }
}
