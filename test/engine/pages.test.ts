import t from 'tap'
import fc from 'fast-check'
import { PageAllocator } from '../../src/engine/sequences/pages.ts'

t.test('every page is allocated once, and again only after its last holder released it', async (t) => {
  const pages = new PageAllocator(3)
  t.same([pages.allocate(), pages.allocate(), pages.allocate()], [0, 1, 2])
  t.throws(() => pages.allocate(), /no free KV page/)
  pages.retain(1)
  pages.release(1)
  t.equal(pages.free, 0)
  pages.release(1)
  t.equal(pages.free, 1)
  t.equal(pages.allocate(), 1)
})

t.test('releasing or sharing a free page, or one that does not exist, throws', async (t) => {
  const pages = new PageAllocator(2)
  t.throws(() => pages.release(0), /not held/)
  t.throws(() => pages.retain(1), /not held/)
  t.throws(() => pages.release(-1), /not held/)
  t.throws(() => pages.release(2), /not held/)
  const page = pages.allocate()
  pages.release(page)
  t.throws(() => pages.release(page), /not held/)
  pages.check()
})

t.test('random programs agree with a reference that counts holders', async () => {
  fc.assert(
    fc.property(
      fc.integer({ min: 1, max: 8 }),
      fc.array(fc.tuple(fc.constantFrom('allocate', 'retain', 'release'), fc.nat(7)), { maxLength: 200, size: 'max' }),
      (total, program) => {
        const pages = new PageAllocator(total)
        const holders = new Array<number>(total).fill(0)
        for (const [what, n] of program) {
          const page = n % total
          if (what === 'allocate') {
            if (pages.free === 0) continue
            const got = pages.allocate()
            if (holders[got] !== 0) throw new Error('a held page was handed out')
            holders[got] = 1
          } else if (holders[page]! > 0) {
            pages[what as 'retain' | 'release'](page)
            holders[page]! += what === 'retain' ? 1 : -1
          }
          pages.check()
          if (pages.free !== holders.filter((h) => h === 0).length) throw new Error('free is wrong')
        }
      }
    )
  )
})
