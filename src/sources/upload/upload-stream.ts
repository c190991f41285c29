import { RefitError } from '../../errors.ts'
import type { StreamPiece, WeightStream } from '../../contract/weight-stream.ts'
import type { UploadSink } from './upload-sink.ts'
import type { Staging } from './upload-staging.ts'

const PIECES = 3
/** Bytes of the piece before that begin each piece: an element of 4 bytes may have left at most 3 there. */
const OVERLAP = 4

/** Bytes per millisecond. */
const LEAST_RATE = 1000

interface Piece {
  begin: number
  slot: Buffer
  length: number
}

/** Passes the data of one file to a running write: bytes come in on one side, pieces go out on the other. */
export class UploadStream implements UploadSink, WeightStream {
  readonly #staging: Staging
  readonly #stallMs: number
  /** Bytes of a whole piece. */
  readonly #bytes: number
  readonly #free: Buffer[] = []
  readonly #full: Piece[] = []
  #slots = 2
  #filling: Buffer
  #filled = 0
  /** Bytes at its start that are copies of the end of the piece before. */
  #carried = 0
  #begin = 0
  /** The piece that is being written. */
  #out: Buffer | undefined
  #hasGone = false
  /** Milliseconds that the writer has waited for bytes since. */
  #waited = 0
  #ended = false
  #closed = false
  #failure: unknown
  #wakeReader: (() => void) | undefined
  #wakeWriter: (() => void) | undefined

  constructor (staging: Staging, stallMs: number) {
    this.#staging = staging
    this.#stallMs = stallMs
    this.#bytes = staging.pieceBytes
    this.#filling = staging.take(staging.pieceBytes)
    try {
      this.#free.push(staging.take(staging.pieceBytes))
    } catch (error) {
      staging.give(this.#filling)
      throw error
    }
  }

  // The input side: the body's bytes arrive.

  write (bytes: Uint8Array): Promise<void> | undefined {
    for (let at = 0; at < bytes.length;) {
      if (this.#failure !== undefined) throw this.#failure
      if (this.#closed) throw givenUp()
      if (this.#filled === this.#bytes && !this.#turn()) {
        this.#wakeReader?.()
        return this.#room().then(async () => await this.write(bytes.subarray(at)))
      }
      const count = Math.min(this.#bytes - this.#filled, bytes.length - at)
      this.#filling.set(count === bytes.length ? bytes : bytes.subarray(at, at + count), this.#filled)
      at += count
      this.#filled += count
    }
    if (this.#isReady()) this.#wakeReader?.()
    return undefined
  }

  async end (): Promise<void> {}

  /** All of the body has come, and it is valid. */
  finish (): void {
    this.#ended = true
    this.#wakeReader?.()
  }

  /** The body broke off, or is not valid. */
  fail (error: unknown): void {
    if (this.#ended) return
    this.#failure ??= error
    this.#wakeReader?.()
    this.#wakeWriter?.()
  }

  /** The reader has stopped: later bytes of the body are refused. The pieces that were read have been written. */
  async close (): Promise<void> {
    if (this.#closed) return
    this.#closed = true
    this.#wakeWriter?.()
    this.#wakeReader?.()
    for (const slot of [...this.#free, ...this.#full.map(({ slot }) => slot), this.#filling, this.#out]) {
      if (slot !== undefined) this.#staging.give(slot)
    }
  }

  // The output side: the write reads pieces.

  /** Throws the body's error if no piece has been read. */
  verify (): void {
    if (this.#failure !== undefined && !this.#hasGone) throw this.#failure
  }

  async ready (): Promise<void> {
    while (!this.#isReady() && !this.#ended && this.#failure === undefined && !this.#closed) await this.#come()
    if (this.#failure !== undefined) throw this.#failure
  }

  /**
   * Resolves when a piece is ready or the body has failed. Other updates wait meanwhile, and once a piece has been read
   * nothing is generated, so the sender's time is limited.
   */
  async #come (): Promise<void> {
    const began = performance.now()
    const came = this.#begin + this.#filled
    const left = this.#stallMs + came / LEAST_RATE - this.#waited
    const timer = setTimeout(() => {
      this.fail(tooSlow(this.#stallMs, came))
    }, left)
    await new Promise<void>(resolve => {
      this.#wakeReader = resolve
    })
    clearTimeout(timer)
    this.#waited += performance.now() - began
  }

  async next (): Promise<StreamPiece | undefined> {
    if (this.#out !== undefined) {
      this.#free.push(this.#out)
      this.#out = undefined
      this.#wakeWriter?.()
    }
    await this.ready()
    const piece = this.#full.shift()
    if (piece !== undefined) {
      this.#out = piece.slot
      this.#hasGone = true
      return pieceOf(piece.begin, piece.slot, piece.length)
    }
    if (this.#filled === this.#carried) return undefined
    // The last piece stays in its buffer, and no other piece begins.
    const last = pieceOf(this.#begin, this.#filling, this.#filled)
    this.#filled = this.#carried
    this.#hasGone = true
    return last
  }

  /** A piece may be read once a byte after it has arrived, so a body that fails keeps at least one piece unread. */
  #isReady (): boolean {
    return this.#full.length > 1 || (this.#full.length === 1 && this.#filled > this.#carried)
  }

  /** Queues the full piece and begins another one. Returns false and does nothing while all buffers are in use. */
  #turn (): boolean {
    if (this.#free.length === 0 && this.#slots < PIECES) {
      const another = this.#staging.tryTake(this.#bytes)
      this.#slots = another === undefined ? PIECES : this.#slots + 1
      if (another !== undefined) this.#free.push(another)
    }
    const next = this.#free.pop()
    if (next === undefined) return false
    this.#filling.copy(next, 0, this.#bytes - OVERLAP, this.#bytes)
    this.#full.push({ begin: this.#begin, slot: this.#filling, length: this.#bytes })
    this.#begin += this.#bytes - OVERLAP
    this.#filling = next
    this.#filled = this.#carried = OVERLAP
    return true
  }

  async #room (): Promise<void> {
    while (this.#free.length === 0 && !this.#closed && this.#failure === undefined) {
      await new Promise<void>(resolve => {
        this.#wakeWriter = resolve
      })
    }
  }
}

function pieceOf (begin: number, slot: Buffer, length: number): StreamPiece {
  return { begin, length, source: { buffer: slot.subarray(0, length) } }
}

function tooSlow (stallMs: number, came: number): RefitError {
  return new RefitError(
    'BODY_STALLED',
    `the body came too slowly to be written as it comes, after ${came} bytes of tensors. Nothing is generated ` +
      `meanwhile, so the engine waits at most ${stallMs / 1000} s (--upload-timeout) and a second for each megabyte. ` +
      'Leave mode=stream out'
  )
}

function givenUp (): RefitError {
  return new RefitError('INTERNAL', 'the rest of this upload is not read any more')
}
