/**
 * KV pages 0..total-1 with reference counts: a request holds each page of its table, the prefix cache each page of its
 * nodes. All operations are O(1). A page that is released twice throws, because it would corrupt another request.
 */
export class PageAllocator {
  readonly total: number
  readonly #stack: Int32Array
  readonly #refs: Int32Array
  #free: number

  constructor (total: number) {
    this.total = total
    this.#refs = new Int32Array(total)
    // The lowest pages are allocated first.
    this.#stack = Int32Array.from({ length: total }, (_, i) => total - 1 - i)
    this.#free = total
  }

  get free (): number {
    return this.#free
  }

  /** A free page, which now has one reference. */
  allocate (): number {
    if (this.#free === 0) throw new Error('no free KV page')
    const page = this.#stack[--this.#free]!
    this.#refs[page] = 1
    return page
  }

  retain (page: number): void {
    if (!(this.#refs[page]! > 0)) throw new Error(`KV page ${page} is not held and cannot be shared`)
    this.#refs[page]!++
  }

  release (page: number): void {
    if (!(this.#refs[page]! > 0)) throw new Error(`KV page ${page} is released but not held`)
    if (--this.#refs[page]! === 0) this.#stack[this.#free++] = page
  }

  refs (page: number): number {
    return this.#refs[page]!
  }

  /** Throws unless every page is either free once or held. O(total): for tests. */
  check (): void {
    const seen = new Uint8Array(this.total)
    for (let i = 0; i < this.#free; i++) {
      const page = this.#stack[i]!
      if (seen[page] !== 0) throw new Error(`KV page ${page} is free twice`)
      if (this.#refs[page] !== 0) throw new Error(`KV page ${page} is free and held ${this.#refs[page]} times`)
      seen[page] = 1
    }
    let held = 0
    for (let page = 0; page < this.total; page++) if (this.#refs[page]! > 0) held++
    if (held + this.#free !== this.total) {
      throw new Error(`${this.#free} free and ${held} held KV pages do not make ${this.total}`)
    }
  }
}
