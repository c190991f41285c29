import { PageAllocator } from '../sequences/pages.ts'
import { PrefixCache } from '../sequences/prefix-cache.ts'
import type { Sequence } from '../sequences/sequence.ts'

/** The KV pages of the engine: which sequence holds which pages, and which stay in the prefix cache. */
export class KvMemory {
  readonly pageSize: number
  readonly allocator: PageAllocator
  readonly cache: PrefixCache

  constructor (pages: number, pageSize: number) {
    this.pageSize = pageSize
    this.allocator = new PageAllocator(pages)
    this.cache = new PrefixCache(this.allocator, pageSize)
  }

  /** Number of pages that `reserve` can supply. */
  get available (): number {
    return this.allocator.free + this.cache.evictable
  }

  /**
   * Number of pages that sequences hold. The rest is free, or is only in the prefix cache, which evicts it when needed.
   */
  get held (): number {
    return this.allocator.total - this.available
  }

  pagesFor (tokens: number): number {
    return Math.ceil(tokens / this.pageSize)
  }

  /** Gives a sequence without pages the longest cached prefix of its tokens. */
  attach (seq: Sequence): void {
    const end = this.cache.match(seq.tokens, seq.matchLimit, rootKey(seq))
    this.cache.lock(end)
    seq.node = end
    while (seq.pageCount < end.depth) seq.addPage(0)
    for (let node = end; node.parent !== null; node = node.parent) {
      this.allocator.retain(node.page)
      seq.pages[node.depth - 1] = node.page
    }
    seq.computed = end.depth * this.pageSize
  }

  /**
   * Reserves pages for the first `tokens` tokens, evicting from the cache if none are free. The caller has checked
   * `available`.
   */
  reserve (seq: Sequence, tokens: number): void {
    const need = this.pagesFor(tokens) - seq.pageCount
    if (need > this.allocator.free) this.cache.evict(need - this.allocator.free)
    for (let i = 0; i < need; i++) seq.addPage(this.allocator.allocate())
  }

  /** Takes pages that lie beyond a sequence's tokens. */
  trim (seq: Sequence): void {
    while (seq.pageCount > this.pagesFor(seq.length)) this.allocator.release(seq.pages[--seq.pageCount]!)
  }

  /** Puts the full pages of computed tokens into the prefix cache, which shares them. */
  keep (seq: Sequence): void {
    const full = Math.floor(seq.computed / this.pageSize)
    if (seq.mixed || full <= (seq.node?.depth ?? 0)) return
    const old = seq.node
    const end = this.cache.extend(old ?? this.cache.root(rootKey(seq)), seq.tokens, seq.pages, full)
    this.cache.lock(end)
    if (old !== null) this.cache.unlock(old)
    seq.node = end
  }

  /** Takes all pages from a sequence. */
  release (seq: Sequence): void {
    for (let i = 0; i < seq.pageCount; i++) this.allocator.release(seq.pages[i]!)
    if (seq.node !== null) this.cache.unlock(seq.node)
    seq.node = null
    seq.pageCount = seq.computed = 0
    seq.mixed = false
  }

  /**
   * Empties the prefix cache. `holders`, the sequences that have pages, keep theirs, and put no page into the cache
   * from now on. Some pages may be shared already: a page that one holder gave to the cache would count as free while
   * another holder uses it without a lock.
   */
  clear (holders: readonly Sequence[]): void {
    this.cache.clear()
    for (const seq of holders) {
      seq.node = null
      seq.mixed = true
    }
  }

  /**
   * Removes an epoch's entries from the prefix cache. `holders`, all sequences with pages of that epoch, are treated as
   * in `clear`.
   */
  clearEpoch (epoch: number, holders: readonly Sequence[]): void {
    for (const seq of holders) {
      if (seq.node !== null) this.cache.unlock(seq.node)
      seq.node = null
      seq.mixed = true
    }
    this.cache.drop(salt => salt.startsWith(epochKey(epoch)))
  }

  /** Throws unless the pages of `holders` and of the cache account for every page. O(pages): for tests. */
  check (holders: readonly Sequence[]): void {
    this.allocator.check()
    const refs = new Int32Array(this.allocator.total)
    this.cache.check((page) => {
      refs[page]!++
    })
    for (const seq of holders) for (let i = 0; i < seq.pageCount; i++) refs[seq.pages[i]!]!++
    for (let page = 0; page < refs.length; page++) {
      if (refs[page] !== this.allocator.refs(page)) {
        throw new Error(`KV page ${page} has ${refs[page]} holders but ${this.allocator.refs(page)} references`)
      }
    }
  }
}

function rootKey ({ weights, cacheKey }: Sequence): string {
  return epochKey(weights?.epoch ?? 0) + cacheKey
}

function epochKey (epoch: number): string {
  return `${epoch}:`
}
