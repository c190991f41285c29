/** Bytes that are taken at a time, for as many pages as fit. */
const SLAB_BYTES = 1 << 22

/**
 * Which experts each token was routed to, kept by KV page: a token that is taken from the prefix cache is not computed, and still has
 * them. A page's entries are those of the computation whose KV it holds. Memory is taken as pages are first used; without anything to
 * record, none.
 */
export class ExpertPages {
  readonly #pageSize: number
  /** Experts of one token, over all layers; 0: none are recorded. */
  readonly #width: number
  readonly #slabPages: number
  readonly #slabs: Uint16Array[] = []

  constructor (pageSize: number, width: number) {
    this.#pageSize = pageSize
    this.#width = width
    this.#slabPages = Math.max(
      1,
      Math.floor(SLAB_BYTES / Uint16Array.BYTES_PER_ELEMENT / Math.max(1, pageSize * width))
    )
  }

  /** Stores `count` tokens' entries, from token `first` of `rows` on, at `position` and on of a sequence that holds `pages`. */
  write (pages: Int32Array, position: number, rows: Uint16Array, first: number, count: number): void {
    const width = this.#width
    if (width === 0) return
    if (rows.length < (first + count) * width) {
      throw new Error(`the device has recorded ${rows.length} experts; expected ${(first + count) * width} or more`)
    }
    this.#pieces(pages, position, position + count, (page, at, length, done) => {
      page.set(rows.subarray((first + done) * width, (first + done + length) * width), at * width)
    })
  }

  /** Entries of the positions [from, to) of a sequence that holds `pages`; empty where there are none. */
  read (pages: Int32Array, from: number, to: number): Uint16Array {
    const width = this.#width
    const rows = new Uint16Array(Math.max(0, to - from) * width)
    this.#pieces(pages, from, to, (page, at, length, done) => {
      rows.set(page.subarray(at * width, (at + length) * width), done * width)
    })
    return rows
  }

  /** Calls `visit` with each page of the positions [from, to): its entries, the first slot in it, how many, and how many came before. */
  #pieces (
    pages: Int32Array,
    from: number,
    to: number,
    visit: (page: Uint16Array, at: number, length: number, done: number) => void
  ): void {
    for (let position = from; position < to;) {
      const at = position % this.#pageSize
      const length = Math.min(this.#pageSize - at, to - position)
      visit(this.#page(pages[Math.floor(position / this.#pageSize)]!), at, length, position - from)
      position += length
    }
  }

  #page (page: number): Uint16Array {
    const entries = this.#pageSize * this.#width
    const slab = this.#slabs[Math.floor(page / this.#slabPages)] ??= new Uint16Array(this.#slabPages * entries)
    const begin = page % this.#slabPages * entries
    return slab.subarray(begin, begin + entries)
  }
}
