import t from 'tap'
import fc from 'fast-check'
import { Harness, makeRequest } from '../helpers/scheduler-harness.ts'

// Requests finish on the weights before a swap. Those are spoilt as soon as the scheduler says that nobody uses them.

const LONG = { maxNewTokens: 12, ignoreEos: true }
const CALL = 1000

const versions = (h: Harness, id: number): string =>
  h.outcomes.get(id)!.events.filter(e => e.tokens.length > 0).map(e => e.weightVersion).join('')

for (const overlap of [true, false]) {
  t.test(`requests that have started finish on their weights, ${overlap ? 'with' : 'without'} overlap`, async t => {
    const h = new Harness({ overlap })
    const old = [1, 2, 3].map(n => h.add(makeRequest([n, 2, 3, 4, 5, 6], LONG)))
    for (let i = 0; i < 4; i++) h.scheduler.step()
    const underWay = h.device.underWay
    h.swapKeepingOld(1, CALL)
    t.equal(h.device.underWay, underWay, 'nothing was waited for')
    t.equal(h.scheduler.stats().onOldWeights, 3)
    const next = [1, 2].map(n => h.add(makeRequest([n, 2, 3, 4, 5, 6], LONG)))
    t.notOk(h.replies.has(CALL))
    let most = 0
    while (!h.replies.has(CALL)) {
      h.scheduler.step()
      h.scheduler.check()
      most = Math.max(most, next.reduce((sum, id) => sum + h.tokens(id).length, 0))
    }
    t.ok(most >= 6, `both kinds take turns: ${most} new tokens meanwhile`)
    t.ok(old.every(id => h.ended(id)))
    h.drain()
    for (const id of [...old, ...next]) h.verify(id)
    t.same(old.map(id => versions(h, id)), old.map(() => '0'.repeat(12)))
    t.same(next.map(id => versions(h, id)), next.map(() => '1'.repeat(12)))
    t.equal(h.outcomes.get(next[0]!)!.events.at(-1)!.cachedTokens, 0, 'pages of the old weights are not found')
    h.scheduler.flush(1)
    t.match(h.scheduler.stats(), { usedTokens: 0, cachedTokens: 0, onOldWeights: 0 })
  })
}

t.test('pages of both weights are shared among their own requests, and the old ones go with the last', async t => {
  const h = new Harness({ maxRunningRequests: 3, pages: 256 })
  const prompt = Array.from({ length: 21 }, (_, i) => i + 1)
  const first = h.add(makeRequest(prompt, LONG))
  for (let i = 0; i < 3; i++) h.scheduler.step()
  const second = h.add(makeRequest(prompt, LONG))
  for (let i = 0; i < 2; i++) h.scheduler.step()
  t.equal(h.outcomes.get(second)!.events.at(-1)!.cachedTokens, 20)
  const cached = h.scheduler.stats().cachedTokens
  h.swapKeepingOld(1, CALL)
  t.equal(h.scheduler.stats().cachedTokens, cached)
  const third = h.add(makeRequest(prompt, LONG))
  h.drain()
  t.equal(h.replies.get(CALL), true)
  const fourth = h.add(makeRequest(prompt, LONG))
  h.drain()
  t.equal(h.outcomes.get(fourth)!.events.at(-1)!.cachedTokens, 20)
  for (const id of [first, second, third, fourth]) h.verify(id)
  t.equal(h.scheduler.stats().cachedTokens, 32, 'only pages of the new weights are left')
})

t.test('at the end of their time requests go on with the weights in use, a partial prompt from its start', async t => {
  const h = new Harness({ maxBatchTokens: 12 })
  const started = h.add(makeRequest([1, 2, 3], LONG))
  for (let i = 0; i < 3; i++) h.scheduler.step()
  const partial = h.add(makeRequest(Array.from({ length: 40 }, (_, i) => i + 1), LONG))
  h.scheduler.step()
  h.swapKeepingOld(1, CALL)
  t.equal(h.scheduler.stats().onOldWeights, 2)
  h.scheduler.step()
  h.scheduler.endOld()
  t.equal(h.replies.get(CALL), true)
  t.equal(h.scheduler.stats().onOldWeights, 0)
  h.scheduler.check()
  h.drain()
  for (const id of [started, partial]) h.verify(id)
  t.match(versions(h, started), /^0{4,8}1{4,8}$/)
  t.equal(versions(h, partial), '1'.repeat(12))
})

t.test('a retracted request is computed again with its own weights, and an aborted one has their label', async t => {
  const h = new Harness()
  const [kept, aborted] = [1, 2].map(n => h.add(makeRequest([n, 2, 3, 4, 5, 6], LONG)))
  for (let i = 0; i < 4; i++) h.scheduler.step()
  h.swapKeepingOld(1, CALL)
  h.scheduler.pause('retract')
  h.scheduler.resume()
  t.equal(h.scheduler.stats().onOldWeights, 2)
  h.scheduler.abort(aborted!)
  t.equal(h.outcomes.get(aborted!)!.events.at(-1)!.weightVersion, '0')
  h.drain()
  h.verify(kept!)
  t.equal(versions(h, kept!), '0'.repeat(12))
  t.equal(h.outcomes.get(kept!)!.events.at(-1)!.retractions, 1)
})

t.test('a write in place and an abort of all end the time of old weights', async t => {
  for (const how of ['in place', 'abort'] as const) {
    const h = new Harness()
    const id = h.add(makeRequest([1, 2, 3], LONG))
    for (let i = 0; i < 4; i++) h.scheduler.step()
    h.swapKeepingOld(1, CALL)
    if (how === 'abort') h.scheduler.abortAll()
    else {
      h.scheduler.pause('in_place')
      h.scheduler.shut(1, false)
      h.openWith(2)
      h.scheduler.resume()
    }
    t.equal(h.replies.get(CALL), true, how)
    h.drain()
    if (how === 'in place') h.verify(id)
    t.equal(h.scheduler.stats().usedTokens, 0)
  }
})

t.test('a pause holds requests on old weights, until it or their time ends', async t => {
  for (const how of ['resume', 'end of their time'] as const) {
    const h = new Harness()
    const id = h.add(makeRequest([1, 2, 3], LONG))
    for (let i = 0; i < 4; i++) h.scheduler.step()
    h.swapKeepingOld(1, CALL)
    h.scheduler.pause('in_place')
    t.notOk(h.replies.has(CALL))
    t.equal(h.scheduler.stats().onOldWeights, 1)
    const before = h.tokens(id).length
    if (how === 'end of their time') {
      h.scheduler.endOld()
      t.equal(h.replies.get(CALL), true)
    }
    t.equal(h.tokens(id).length, before, 'nothing runs in a pause')
    h.scheduler.resume()
    h.drain()
    h.verify(id)
    t.equal(h.replies.get(CALL), true, how)
    t.equal(versions(h, id), '0'.repeat(how === 'resume' ? 12 : before).padEnd(12, '1'))
  }
})

t.test('in random order, each request is of the weights with which it started until their time ends', async () => {
  const request = fc.record({
    what: fc.constant('add' as const),
    length: fc.integer({ min: 1, max: 30 }),
    prompt: fc.nat(3),
    out: fc.nat(20),
    copies: fc.constantFrom(1, 1, 3),
    score: fc.boolean()
  })
  const command = fc.oneof(
    { weight: 5, arbitrary: request },
    { weight: 8, arbitrary: fc.record({ what: fc.constant('step' as const), count: fc.integer({ min: 1, max: 6 }) }) },
    { weight: 3, arbitrary: fc.record({ what: fc.constant('swap' as const), keepOld: fc.boolean() }) },
    { weight: 1, arbitrary: fc.record({ what: fc.constant('endOld' as const) }) },
    { weight: 1, arbitrary: fc.record({ what: fc.constant('retract' as const) }) },
    { weight: 1, arbitrary: fc.record({ what: fc.constant('flush' as const) }) },
    { weight: 1, arbitrary: fc.record({ what: fc.constant('abort' as const), n: fc.nat() }) }
  )
  const setup = fc.record({ overlap: fc.boolean(), pages: fc.integer({ min: 16, max: 64 }) })
  let waits = 0
  fc.assert(
    fc.property(setup, fc.array(command, { maxLength: 40, size: 'max' }), (options, commands) => {
      const h = new Harness({ ...options, maxBatchTokens: 16, contextLength: 60 })
      const ids: number[] = []
      let call = CALL
      let weights = 0
      for (const c of commands) {
        if (c.what === 'add') {
          const prompt = Array.from({ length: c.length }, (_, i) => 1 + (c.prompt * 7 + i) % 90)
          for (let i = 0; i < c.copies; i++) {
            const sampling = { maxNewTokens: c.out + 1, seed: BigInt(i) }
            ids.push(h.add(makeRequest(prompt, sampling, c.score ? { startLen: 1 } : null)))
          }
        } else if (c.what === 'step') {
          for (let i = 0; i < c.count; i++) if (h.scheduler.step()) h.scheduler.check()
        } else if (c.what === 'swap') {
          // As the store does: an update waits for the set, or its time ends.
          if (call > CALL && !h.replies.has(call)) h.scheduler.endOld()
          if (c.keepOld) h.swapKeepingOld(++weights, ++call)
          else h.swapTo(++weights)
          if (c.keepOld && !h.replies.has(call)) waits++
        } else if (c.what === 'endOld') h.scheduler.endOld()
        else if (c.what === 'retract') h.scheduler.dropCache(true)
        else if (c.what === 'flush') h.scheduler.dropCache(false)
        else if (ids.length > 0) h.scheduler.abort(ids[c.n % ids.length]!)
        h.scheduler.check()
      }
      h.drain()
      for (const id of ids) h.verify(id)
      for (let n = CALL + 1; n <= call; n++) if (!h.replies.has(n)) throw new Error(`call ${n} was not answered`)
      if (h.scheduler.stats().usedTokens !== 0) throw new Error('pages are left')
    }),
    { numRuns: 1000 }
  )
  t.ok(waits > 100, `${waits} swaps with old requests`)
})
