import t from 'tap'
import fc from 'fast-check'
import { PageAllocator } from '../../src/engine/sequences/pages.ts'
import { PrefixCache } from '../../src/engine/sequences/prefix-cache.ts'
import type { CacheNode } from '../../src/engine/sequences/prefix-cache.ts'

const SIZE = 2

/** Inserts the full pages of `tokens` in new pages without other holders, and returns the path's pages. */
function insert (pages: PageAllocator, cache: PrefixCache, tokens: number[], salt = ''): number[] {
  const count = Math.floor(tokens.length / SIZE)
  const own = Int32Array.from({ length: count }, () => pages.allocate())
  const root = cache.root(salt)
  cache.lock(root)
  const end = cache.extend(root, Int32Array.from(tokens), own, count)
  cache.lock(end)
  cache.unlock(root)
  cache.unlock(end)
  for (const page of own) pages.release(page)
  cache.check(() => {})
  return [...own]
}

function path (node: CacheNode): number[] {
  return node.parent === null ? [] : [...path(node.parent), node.page]
}

function lookup (cache: PrefixCache, tokens: number[], limit = tokens.length, salt = ''): number[] {
  const node = cache.match(Int32Array.from(tokens), limit, salt)
  cache.lock(node)
  const found = path(node)
  cache.unlock(node)
  return found
}

t.test('only whole pages below the limit are matched', async (t) => {
  const pages = new PageAllocator(8)
  const cache = new PrefixCache(pages, SIZE)
  const held = insert(pages, cache, [1, 2, 3, 4, 5])
  t.same(held.length, 2)
  t.same(lookup(cache, [1, 2, 3, 4, 9]), held)
  t.same(lookup(cache, [1, 2, 3, 4], 3), held.slice(0, 1))
  t.same(lookup(cache, [1, 2, 3, 9]), held.slice(0, 1))
  t.same(lookup(cache, [2, 1]), [])
  t.same(lookup(cache, [3, 4]), [], 'a page is found only behind its own prefix')
})

t.test('salts share no entries, and an unused salt leaves no memory', async (t) => {
  const pages = new PageAllocator(4)
  const cache = new PrefixCache(pages, SIZE)
  const held = insert(pages, cache, [1, 2], 'a')
  t.same(lookup(cache, [1, 2], 2, 'a'), held)
  t.same(lookup(cache, [1, 2], 2, 'b'), [])
  t.same(lookup(cache, [1, 2], 2), [])
  cache.check(() => {})
})

t.test('a page that was computed twice is freed', async (t) => {
  const pages = new PageAllocator(4)
  const cache = new PrefixCache(pages, SIZE)
  const first = insert(pages, cache, [1, 2])
  t.same(insert(pages, cache, [1, 2, 3, 4])[0], first[0])
  t.equal(pages.free, 2)
  t.equal(cache.size, 2)
})

t.test('the least recently used leaf is evicted first, a locked path never', async (t) => {
  const pages = new PageAllocator(8)
  const cache = new PrefixCache(pages, SIZE)
  insert(pages, cache, [1, 1, 2, 2])
  insert(pages, cache, [1, 1, 3, 3])
  insert(pages, cache, [4, 4])
  lookup(cache, [1, 1, 2, 2])
  t.equal(cache.evict(1), 1)
  t.same(lookup(cache, [1, 1, 3, 3]).length, 1, 'its branch was used longest ago')
  t.same(lookup(cache, [1, 1, 2, 2]).length, 2)
  const node = cache.match(Int32Array.of(1, 1, 2, 2), 4, '')
  cache.lock(node)
  t.equal(cache.evictable, 1)
  t.equal(cache.evict(9), 1)
  t.same(lookup(cache, [4, 4]), [])
  t.same(path(node).length, 2)
  cache.unlock(node)
  t.equal(cache.evict(9), 2)
  t.equal(pages.free, 8)
  cache.check(() => {})
})

t.test('pages with equal hashes are distinguished, and each can be evicted', async (t) => {
  const pages = new PageAllocator(8)
  const cache = new PrefixCache(pages, SIZE)
  const root = cache.root('')
  // Locked, because an unlocked root is removed with its last entry, and the next root has other hashes.
  cache.lock(root)
  const seen = new Map<number, number[]>()
  let pair: number[][] | undefined
  // About 77,000 draws have even odds of a collision among 2^32 hashes.
  for (let i = 0; pair === undefined; i++) {
    const tokens = [Math.imul(i, 2654435761) >>> 1, i]
    const hash = cache.hash(root, Int32Array.from(tokens))
    const other = seen.get(hash)
    if (other !== undefined) pair = [other, tokens]
    seen.set(hash, tokens)
  }
  for (const kept of [0, 1]) {
    const held = pair.map((tokens) => insert(pages, cache, tokens))
    t.same(pair.map((tokens) => lookup(cache, tokens)), held)
    t.not(held[0]![0], held[1]![0])
    lookup(cache, pair[kept]!)
    t.equal(cache.evict(1), 1)
    t.same(pair.map((tokens) => lookup(cache, tokens)), held.map((path, i) => i === kept ? path : []))
    cache.check(() => {})
    t.equal(cache.evict(1), 1)
  }
  cache.unlock(root)
  cache.check(() => {})
})

t.test('clear removes every entry, and pages with other holders stay allocated', async (t) => {
  const pages = new PageAllocator(4)
  const cache = new PrefixCache(pages, SIZE)
  const [page] = insert(pages, cache, [1, 2, 3, 4])
  pages.retain(page!)
  cache.clear()
  t.equal(cache.size, 0)
  t.equal(pages.free, 3)
  t.same(lookup(cache, [1, 2]), [])
  pages.release(page!)
  t.equal(pages.free, 4)
})

t.test('random programs agree with a reference that keeps a list of prefixes', async () => {
  const tokens = fc.array(fc.nat(1), { minLength: 1, maxLength: 10 })
  const command = fc.oneof(
    fc.record({ what: fc.constant('insert' as const), tokens, salt: fc.constantFrom('', 'x') }),
    fc.record({ what: fc.constant('match' as const), tokens, salt: fc.constantFrom('', 'x') }),
    fc.record({ what: fc.constant('hold' as const), tokens, salt: fc.constantFrom('', 'x') }),
    fc.record({ what: fc.constant('drop' as const), n: fc.nat(9) }),
    fc.record({ what: fc.constant('evict' as const), n: fc.nat(4) })
  )
  fc.assert(
    fc.property(fc.array(command, { maxLength: 80, size: 'max' }), (program) => {
      const pages = new PageAllocator(24)
      const cache = new PrefixCache(pages, SIZE)
      // Prefix (with its salt) to page, in order of last use.
      const reference = new Map<string, number>()
      const held: { node: CacheNode, keys: string[] }[] = []
      const keysOf = (list: number[], salt: string): string[] =>
        Array.from(
          { length: Math.floor(list.length / SIZE) },
          (_, i) => `${salt}:${list.slice(0, (i + 1) * SIZE).join()}`
        )
      const touch = (keys: string[]): void => {
        for (
          const key of [...keys].reverse()
        ) {
          const page = reference.get(key)
          if (page === undefined) continue
          reference.delete(key)
          reference.set(key, page)
        }
      }
      const locked = (key: string): boolean => held.some((h) => h.keys.includes(key))
      for (const c of program) {
        if (c.what === 'insert') {
          const keys = keysOf(c.tokens, c.salt)
          if (pages.free < keys.length) continue
          const got = insert(pages, cache, c.tokens, c.salt)
          keys.forEach((key, i) => {
            if (reference.has(key) && reference.get(key) !== got[i]) throw new Error('another page for a known prefix')
            reference.set(key, got[i]!)
          })
          touch(keys)
        } else if (c.what === 'match' || c.what === 'hold') {
          const keys = keysOf(c.tokens, c.salt).filter((key) => reference.has(key))
          const node = cache.match(Int32Array.from(c.tokens), c.tokens.length, c.salt)
          cache.lock(node)
          if (path(node).join() !== keys.map((key) => reference.get(key)).join()) throw new Error('a wrong match')
          if (c.what === 'hold') held.push({ node, keys })
          else {
            cache.unlock(node)
            touch(keys.filter((key) => !locked(key)))
          }
        } else if (c.what === 'drop' && held.length > 0) {
          const [{ node, keys }] = held.splice(c.n % held.length, 1) as [{ node: CacheNode, keys: string[] }]
          cache.unlock(node)
          touch(keys.filter((key) => !locked(key)))
        } else if (c.what === 'evict') {
          const victims = [...reference.keys()].filter((key) => !locked(key)).slice(0, c.n)
          if (cache.evict(c.n) !== victims.length) throw new Error('evict freed another number')
          for (const key of victims) reference.delete(key)
        }
        cache.check(() => {})
        pages.check()
        if (cache.size !== reference.size) throw new Error(`${cache.size} pages, expected ${reference.size}`)
        if (pages.free !== 24 - reference.size) throw new Error('pages leak')
      }
    }),
    { numRuns: 500 }
  )
})
