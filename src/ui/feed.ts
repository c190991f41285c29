import { RefitError } from '../errors.ts'
import { FeedReader } from './feed-reader.ts'

/** Makes the frames. Both may take a while, as in a gateway that reads its engines. */
export interface FeedSource {
  /** Everything that a page needs to begin. */
  hello: () => Promise<object> | object
  /** The state now, and what has changed since the last tick. */
  tick: () => Promise<object> | object
}

export interface FeedOptions {
  /** Time between two ticks (default 250 ms). */
  tickMs?: number
  /** The same while more than FEW pages are open (default 1 s). */
  slowTickMs?: number
}

/** With more pages than this, ticks are slower: each tick costs one write for each page. */
const FEW = 16
const MAX_PAGES = 1000
/** Pages that open together share one first frame. */
const HELLO_MS = 250

/**
 * The event stream of pages. A tick is made and serialised once for all pages, and only while one is open. What pages
 * do not read in time is dropped (FeedReader).
 */
export class Feed {
  readonly #source: FeedSource
  readonly #tickMs: number
  readonly #slowTickMs: number
  readonly #readers = new Set<FeedReader>()
  #timer: NodeJS.Timeout | undefined
  #ticking = false
  #isClosed = false
  #hello: { at: number, frame: Promise<Buffer> } | null = null

  constructor (source: FeedSource, { tickMs = 250, slowTickMs = Math.max(tickMs, 1000) }: FeedOptions = {}) {
    this.#source = source
    this.#tickMs = tickMs
    this.#slowTickMs = slowTickMs
  }

  get pages (): number {
    return this.#readers.size
  }

  /** A page opens. It closes when its stream is destroyed or ends. */
  open (): FeedReader {
    if (this.#isClosed) throw new RefitError('ENGINE_CLOSED', 'the server is shutting down')
    if (this.#readers.size >= MAX_PAGES) {
      throw new RefitError('PAGES_FULL', `${MAX_PAGES} pages are open; close some of them`)
    }
    const reader = new FeedReader(async () => await this.#first())
    this.#readers.add(reader)
    reader.once('close', () => {
      this.#readers.delete(reader)
      if (this.#readers.size === 0) this.#rest()
    })
    this.#schedule()
    return reader
  }

  /** Ends the streams of all pages. */
  close (): void {
    this.#isClosed = true
    this.#rest()
    for (const reader of this.#readers) reader.push(null)
  }

  async #first (): Promise<Buffer> {
    const now = performance.now()
    if (this.#hello === null || now - this.#hello.at > HELLO_MS) {
      const frame = (async () => frameOf('hello', await this.#source.hello()))()
      this.#hello = { at: now, frame }
    }
    return await this.#hello.frame
  }

  #schedule (): void {
    if (this.#isClosed || this.#timer !== undefined || this.#ticking || this.#readers.size === 0) return
    this.#timer = setTimeout(() => {
      this.#timer = undefined
      void this.#tick()
    }, this.#readers.size > FEW ? this.#slowTickMs : this.#tickMs)
      .unref()
  }

  async #tick (): Promise<void> {
    this.#ticking = true
    try {
      const frame = frameOf('state', await this.#source.tick())
      // It lacks what this tick reports.
      this.#hello = null
      for (const reader of this.#readers) reader.offer(frame)
    } catch (error) {
      // Pages connect again. Nobody awaits a tick, so its error would end the process.
      for (const reader of this.#readers) reader.destroy(error as Error)
    } finally {
      this.#ticking = false
      this.#schedule()
    }
  }

  #rest (): void {
    clearTimeout(this.#timer)
    this.#timer = undefined
    this.#hello = null
  }
}

function frameOf (event: string, data: object): Buffer {
  return Buffer.from(`event: ${event}\ndata: ${JSON.stringify(data)}\n\n`)
}
