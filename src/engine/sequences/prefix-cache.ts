import type { PageAllocator } from './pages.ts'

/** One page of the tree: its tokens follow its parent's. A root has no page and no parent. */
export interface CacheNode {
  readonly id: number
  readonly parent: CacheNode | null
  readonly page: number
  /** Pages from the root to here; 0 for a root. */
  readonly depth: number
  readonly hash: number
  readonly salt: string
  /** Number of holders of this node, plus its children with holders. */
  locks: number
  children: number
  /** Next node with the same hash. */
  chain: CacheNode | null
  /** Neighbours in the eviction list; both null while locked. */
  older: CacheNode | null
  newer: CacheNode | null
}

/**
 * Prefix cache: a tree with one node per full page of tokens, and one root per cache salt. Salts keep apart what must
 * never be shared, such as pages that other weights have computed.
 * Nodes without locks are in a list from least to most recently used. Unlocking appends a path leaf first, so a parent
 * always comes after its children and the head of the list is a leaf: eviction takes the head, without a search.
 */
export class PrefixCache {
  readonly #pages: PageAllocator
  readonly #pageSize: number
  /** Tokens of each cached page, by page number. */
  readonly #tokens: Int32Array
  readonly #nodes = new Map<number, CacheNode>()
  readonly #roots = new Map<string, CacheNode>()
  #oldest: CacheNode | null = null
  #newest: CacheNode | null = null
  #size = 0
  #evictable = 0
  #nextId = 1

  constructor (pages: PageAllocator, pageSize: number) {
    this.#pages = pages
    this.#pageSize = pageSize
    this.#tokens = new Int32Array(pages.total * pageSize)
  }

  /** Pages in the cache. */
  get size (): number {
    return this.#size
  }

  /** Pages that `evict` could free now. */
  get evictable (): number {
    return this.#evictable
  }

  /** The root of a salt. Lock it to keep it: a root without entries is removed with its last lock. */
  root (salt: string): CacheNode {
    let root = this.#roots.get(salt)
    if (root === undefined) {
      root = {
        id: this.#nextId++,
        parent: null,
        page: -1,
        depth: 0,
        hash: 0,
        salt,
        locks: 0,
        children: 0,
        chain: null,
        older: null,
        newer: null
      }
      this.#roots.set(salt, root)
    }
    return root
  }

  /** The deepest node whose path equals the first tokens, at most `limit` of them. */
  match (tokens: Int32Array, limit: number, salt: string): CacheNode {
    let node = this.root(salt)
    for (let end = this.#pageSize; end <= limit; end += this.#pageSize) {
      const child = this.#child(node, tokens, this.hash(node, tokens))
      if (child === undefined) break
      node = child
    }
    return node
  }

  /** Hash of the page of `tokens` that would follow `parent`. */
  hash (parent: CacheNode, tokens: Int32Array): number {
    const from = parent.depth * this.#pageSize
    let h = Math.imul(parent.id, 0x9e3779b1)
    for (let i = from; i < from + this.#pageSize; i++) {
      h = Math.imul(h ^ tokens[i]!, 0x85ebca6b)
      h ^= h >>> 15
    }
    return h
  }

  lock (node: CacheNode): void {
    for (let n: CacheNode | null = node; n !== null && n.locks++ === 0; n = n.parent) {
      if (n.parent !== null) this.#unlink(n)
    }
  }

  unlock (node: CacheNode): void {
    for (let n: CacheNode | null = node; n !== null; n = n.parent) {
      if (n.locks === 0) throw new Error('a prefix-cache node is unlocked but not locked')
      if (--n.locks > 0) return
      if (n.parent === null) this.#dropIdleRoot(n)
      else this.#append(n)
    }
  }

  /**
   * Extends the path that ends at `from` (locked by the caller) to the first `count` pages of `tokens`, whose KV is in
   * `pages`. If an equal page exists, the caller's page is released and `pages` gets the cached one. Returns the path's
   * new end.
   */
  extend (from: CacheNode, tokens: Int32Array, pages: Int32Array, count: number): CacheNode {
    let node = from
    for (let i = from.depth; i < count; i++) {
      const hash = this.hash(node, tokens)
      const child = this.#child(node, tokens, hash)
      if (child === undefined) {
        node = this.#create(node, tokens, hash, pages[i]!)
        continue
      }
      if (child.page !== pages[i]) {
        this.#pages.retain(child.page)
        this.#pages.release(pages[i]!)
        pages[i] = child.page
      }
      node = child
    }
    return node
  }

  /** Drops the least recently used pages without locks, at most `count`. Returns their number. */
  evict (count: number): number {
    let done = 0
    for (; done < count && this.#oldest !== null; done++) this.#evict(this.#oldest)
    return done
  }

  /** Drops the pages without locks whose salt is wanted: O(evictable). */
  drop (isWanted: (salt: string) => boolean): void {
    for (let node = this.#oldest, newer; node !== null; node = newer) {
      newer = node.newer
      if (isWanted(node.salt)) this.#evict(node)
    }
  }

  /**
   * Removes everything. Nodes that callers hold are invalid afterwards: they must not be locked, unlocked or extended.
   */
  clear (): void {
    for (const first of this.#nodes.values()) {
      for (let node: CacheNode | null = first; node !== null; node = node.chain) this.#pages.release(node.page)
    }
    this.#nodes.clear()
    this.#roots.clear()
    this.#oldest = this.#newest = null
    this.#size = this.#evictable = 0
  }

  /**
   * Calls `visit` with the page of every node. Throws if counts or the eviction list do not match the tree. O(size):
   * for tests.
   */
  check (visit: (page: number) => void): void {
    let size = 0
    for (const first of this.#nodes.values()) {
      for (let node: CacheNode | null = first; node !== null; node = node.chain) {
        size++
        visit(node.page)
        if (node.locks > 0 && node.parent!.locks === 0) throw new Error('a locked node has an unlocked parent')
      }
    }
    if (size !== this.#size) throw new Error(`${size} nodes, but a size of ${this.#size}`)
    const seen = new Set<CacheNode>()
    for (let node = this.#oldest; node !== null; node = node.newer) {
      if (node.locks > 0) throw new Error('a locked node is in the eviction list')
      if (seen.has(node.parent!)) throw new Error('a parent precedes its child in the eviction list')
      seen.add(node)
    }
    if (seen.size !== this.#evictable) {
      throw new Error(`${seen.size} nodes in the eviction list, but ${this.#evictable} evictable`)
    }
    for (const root of this.#roots.values()) {
      if (root.locks === 0 && root.children === 0) throw new Error('an idle root was kept')
    }
  }

  /** Drops a leaf without locks. */
  #evict (node: CacheNode): void {
    this.#unlink(node)
    this.#forget(node)
    this.#pages.release(node.page)
    this.#size--
    const parent = node.parent!
    parent.children--
    if (parent.parent === null) this.#dropIdleRoot(parent)
  }

  #child (parent: CacheNode, tokens: Int32Array, hash: number): CacheNode | undefined {
    const from = parent.depth * this.#pageSize
    for (let node = this.#nodes.get(hash) ?? null; node !== null; node = node.chain) {
      if (node.parent === parent && this.#equal(node.page, tokens, from)) return node
    }
    return undefined
  }

  #equal (page: number, tokens: Int32Array, from: number): boolean {
    const own = page * this.#pageSize
    for (let i = 0; i < this.#pageSize; i++) if (this.#tokens[own + i] !== tokens[from + i]) return false
    return true
  }

  #create (parent: CacheNode, tokens: Int32Array, hash: number, page: number): CacheNode {
    const chain = this.#nodes.get(hash) ?? null
    const node: CacheNode = {
      id: this.#nextId++,
      parent,
      page,
      depth: parent.depth + 1,
      hash,
      salt: parent.salt,
      locks: 0,
      children: 0,
      chain,
      older: null,
      newer: null
    }
    const from = parent.depth * this.#pageSize
    this.#tokens.set(tokens.subarray(from, from + this.#pageSize), page * this.#pageSize)
    this.#nodes.set(hash, node)
    this.#pages.retain(page)
    parent.children++
    this.#size++
    this.#append(node)
    return node
  }

  #forget (node: CacheNode): void {
    const first = this.#nodes.get(node.hash)!
    if (first !== node) {
      let before = first
      while (before.chain !== node) before = before.chain!
      before.chain = node.chain
    } else if (node.chain !== null) this.#nodes.set(node.hash, node.chain)
    else this.#nodes.delete(node.hash)
  }

  #dropIdleRoot (root: CacheNode): void {
    if (root.locks === 0 && root.children === 0) this.#roots.delete(root.salt)
  }

  #append (node: CacheNode): void {
    node.older = this.#newest
    node.newer = null
    if (this.#newest === null) this.#oldest = node
    else this.#newest.newer = node
    this.#newest = node
    this.#evictable++
  }

  #unlink (node: CacheNode): void {
    if (node.older === null) this.#oldest = node.newer
    else node.older.newer = node.newer
    if (node.newer === null) this.#newest = node.older
    else node.newer.older = node.older
    node.older = node.newer = null
    this.#evictable--
  }
}
