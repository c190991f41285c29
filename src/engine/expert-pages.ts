import type { Sequence } from './sequences/sequence.ts'

/** Memory is allocated in slabs of this size, each for as many pages as fit. */
const SLAB_BYTES = 1 << 22

/**
 * The experts of each token, stored by KV page: a token from the prefix cache is not computed, but its experts are
 * still known. A page's entries come from the computation whose KV it holds. Memory is allocated when pages are first
 * used, and not at all if nothing is recorded.
 */
export class ExpertPages {
  readonly #pageSize: number
  /** Experts of one token, over all layers; 0 if none are recorded. */
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

  /**
   * Stores the entries of `count` tokens, from token `first` of `rows` on, at `position` of a sequence that holds
   * `pages`.
   */
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

  /**
   * The experts that a sequence asks for, of all its tokens except the last: from its pages if all of them are
   * computed, otherwise those of the last computation.
   */
  of (seq: Sequence): Uint16Array | undefined {
    const from = seq.request.expertsFrom
    if (from === undefined) return undefined
    if (seq.pageCount === 0 || seq.prefilling) return seq.experts
    return this.read(seq.pages, from, seq.length - 1)
  }

  /** Entries of the positions [from, to) of a sequence that holds `pages`; empty if nothing is recorded. */
  read (pages: Int32Array, from: number, to: number): Uint16Array {
    const width = this.#width
    const rows = new Uint16Array(Math.max(0, to - from) * width)
    this.#pieces(pages, from, to, (page, at, length, done) => {
      rows.set(page.subarray(at * width, (at + length) * width), done * width)
    })
    return rows
  }

  /**
   * Calls `visit` for each page of the positions [from, to), with its entries, the first slot in it, the number of
   * slots, and the number of slots before it.
   */
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
