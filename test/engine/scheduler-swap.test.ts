import t from 'tap'
import fc from 'fast-check'
import { Harness, makeRequest } from '../helpers/scheduler-harness.ts'

// The sets of weights change places while requests run. The set that was in use is spoilt at once.

const LONG = { maxNewTokens: 12, ignoreEos: true }

function versions (h: Harness, id: number): string {
  return h.outcomes.get(id)!.events.filter(e => e.tokens.length > 0).map(e => e.weightVersion).join('')
}

for (const overlap of [true, false]) {
  t.test(`requests go on with their KV under the new weights, ${overlap ? 'with' : 'without'} overlap`, async t => {
    const h = new Harness({ overlap })
    const ids = [1, 2, 3].map(n => h.add(makeRequest([n, 2, 3, 4, 5, 6], LONG)))
    for (let i = 0; i < 4; i++) h.scheduler.step()
    const underWay = h.device.underWay
    t.equal(underWay, overlap ? 1 : 0)
    h.swapTo(1)
    t.equal(h.device.underWay, 0, 'the step under way has ended, with the old weights')
    h.drain()
    for (const id of ids) {
      h.verify(id)
      t.equal(versions(h, id), '0'.repeat(4 + underWay) + '1'.repeat(8 - underWay))
      t.equal(h.outcomes.get(id)!.events.at(-1)!.retractions, 0)
    }
    t.equal(h.scheduler.stats().usedTokens, 0)
  })
}

t.test('a prompt that is computed in part begins again, so that all of it is of the same weights', async t => {
  const h = new Harness({ maxBatchTokens: 12 })
  const id = h.add(makeRequest(Array.from({ length: 40 }, (_, i) => i + 1), LONG))
  h.scheduler.step()
  h.swapTo(1)
  h.drain()
  h.verify(id)
  t.equal(versions(h, id), '1'.repeat(12))
})

t.test('with abort requests end with their tokens, and a swap needs no gate and no running engine', async t => {
  const h = new Harness()
  const id = h.add(makeRequest([1, 2, 3], LONG))
  for (let i = 0; i < 3; i++) h.scheduler.step()
  h.swapTo(1, { abort: true })
  t.equal(h.outcomes.get(id)!.events.at(-1)!.finish?.type, 'abort')
  h.scheduler.pause('in_place')
  const held = h.add(makeRequest([4, 5, 6], LONG))
  h.swapTo(2)
  h.scheduler.shut(1, false)
  t.equal(h.replies.get(1), true)
  h.swapTo(3)
  h.openWith(3)
  t.equal(h.tokens(held).length, 0, 'the pause goes on')
  h.device.sets = null
  h.scheduler.resume()
  h.drain()
  h.verify(held)
  t.equal(versions(h, held), '3'.repeat(12))
})

t.test('a cache entry of old weights is never hit, whether the cache is flushed or not', async t => {
  for (const flushCache of [true, false]) {
    const h = new Harness()
    const prompt = Array.from({ length: 21 }, (_, i) => i + 1)
    h.add(makeRequest(prompt, LONG))
    h.drain()
    h.swapTo(1, { flushCache })
    const id = h.add(makeRequest(prompt, LONG))
    h.drain()
    h.verify(id)
    t.equal(h.outcomes.get(id)!.events.at(-1)!.cachedTokens, 0)
  }
})

t.test('whenever the sets change places, each token is of the weights that its version names', async () => {
  const request = fc.record({ length: fc.integer({ min: 1, max: 30 }), prompt: fc.nat(3), out: fc.nat(20) })
  const run = fc.record({
    overlap: fc.boolean(),
    pages: fc.integer({ min: 24, max: 64 }),
    requests: fc.array(request, { minLength: 1, maxLength: 12 }),
    swaps: fc.array(fc.nat(6), { minLength: 1, maxLength: 12 })
  })
  fc.assert(
    fc.property(run, ({ overlap, pages, requests, swaps }) => {
      const h = new Harness({ overlap, pages, maxBatchTokens: 16 })
      const ids = requests.map(({ length, prompt, out }, n) =>
        h.add(makeRequest(Array.from({ length }, (_, i) => 1 + (prompt * 7 + i) % 90), {
          maxNewTokens: out + 1,
          seed: BigInt(n)
        }))
      )
      for (const [weights, steps] of swaps.entries()) {
        for (let i = 0; i < steps; i++) if (h.scheduler.step()) h.scheduler.check()
        h.swapTo(weights + 1, { flushCache: steps % 2 === 0 })
        h.scheduler.check()
      }
      h.drain()
      for (const id of ids) h.verify(id)
    }),
    { numRuns: 300 }
  )
})
