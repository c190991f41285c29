import { Readable } from 'node:stream'

/** Bytes that may wait in the stream, beside what the socket holds. */
const HIGH_WATER = 64 * 1024
/** Frames of a reader that is behind. One more, and all are dropped: the reader begins anew. */
const MAX_WAITING = 8

/** The frames of one page. A page that reads too slowly loses old frames, and gets the first frame again. */
export class FeedReader extends Readable {
  readonly #first: () => Promise<Buffer>
  #waiting: Buffer[] = []
  /** The consumer has room. */
  #wanted = false
  /** The next frame is the first one, which describes everything. */
  #anew = true
  #making = false
  /** Times that frames were dropped. */
  drops = 0

  /** `first` makes the frame that a page begins with. */
  constructor (first: () => Promise<Buffer>) {
    super({ highWaterMark: HIGH_WATER })
    this.#first = first
  }

  offer (frame: Buffer): void {
    // The first frame is made after this one, and contains it.
    if (this.#anew) return
    if (this.#wanted && !this.#making) {
      this.#wanted = this.push(frame)
      return
    }
    if (this.#waiting.push(frame) <= MAX_WAITING) return
    this.#waiting = []
    this.#anew = true
    this.drops++
  }

  override _read (): void {
    this.#wanted = true
    this.#pump()
  }

  #pump (): void {
    if (this.#making) return
    if (this.#wanted && this.#anew) {
      this.#making = true
      this.#anew = false
      this.#first().then(frame => {
        this.#making = false
        this.#wanted = this.push(frame)
        this.#pump()
      }, (error: Error) => this.destroy(error))
      return
    }
    while (this.#wanted && this.#waiting.length > 0) this.#wanted = this.push(this.#waiting.shift())
  }
}
