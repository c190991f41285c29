import t from 'tap'
import fc from 'fast-check'
import { Harness, makeRequest } from '../helpers/scheduler-harness.ts'

// A step fails while requests finish on the weights before a swap: those of the step end, those of the other weights
// do not notice.

const LONG = { maxNewTokens: 12, ignoreEos: true }
const CALL = 1000
const FAILED = { code: 'INTERNAL', message: 'the device failed in a step: the kernel fell over' }

for (const overlap of [true, false]) {
  t.test(`only requests of the failed step end, ${overlap ? 'with' : 'without'} overlap, whatever step fails`, t => {
    const failed = { old: 0, new: 0 }
    for (let at = 0; at < 12; at++) {
      const h = new Harness({ overlap })
      const start = (numbers: number[]) => numbers.map(n => h.add(makeRequest([n, 2, 3, 4, 5, 6], LONG)))
      const old = start([1, 2, 3])
      for (let i = 0; i < 4; i++) h.scheduler.step()
      h.swapKeepingOld(1, CALL)
      const next = start([1, 2])
      for (let i = 0; i < at; i++) h.scheduler.step()
      h.device.fault = new Error('the kernel fell over')
      while (h.device.fault !== null) {
        h.scheduler.step()
        h.scheduler.check()
      }
      const wrong = [...old, ...next].filter(id => h.outcomes.get(id)!.error !== null)
      const side = wrong.includes(old[0]!) ? 'old' : 'new'
      failed[side]++
      t.same(wrong, side === 'old' ? old : next, `step ${at}`)
      for (const id of wrong) t.same(h.outcomes.get(id)!.error, FAILED)
      if (side === 'old') t.ok(h.replies.get(CALL), 'the set is free at once')
      h.drain()
      for (const id of [...old, ...next]) h.verify(id)
      for (const id of [...old, ...next].filter(id => !wrong.includes(id))) t.equal(h.tokens(id).length, 12)
      t.ok(h.replies.get(CALL), 'the set is free for the next update')
      h.swapKeepingOld(2, CALL + 1)
      t.ok(h.replies.get(CALL + 1))
      const last = h.add(makeRequest([1, 2, 3, 4, 5, 6], LONG))
      h.drain()
      h.verify(last)
      t.equal(h.outcomes.get(last)!.events[0]!.cachedTokens, 0)
      h.scheduler.flush(1)
      t.match(h.scheduler.stats(), { usedTokens: 0, cachedTokens: 0, onOldWeights: 0, running: 0, queued: 0 })
    }
    t.ok(failed.old > 1 && failed.new > 1, JSON.stringify(failed))
    t.end()
  })
}

t.test('requests that wait for the prefix of one that failed on old weights compute it themselves', t => {
  const h = new Harness({ maxBatchTokens: 8 })
  const prompt = Array.from({ length: 40 }, (_, i) => i + 1)
  const old = [0, 1, 2].map(n => h.add(makeRequest(prompt, { ...LONG, seed: BigInt(n) })))
  h.scheduler.step()
  h.swapKeepingOld(1, CALL)
  const next = [0, 1].map(n => h.add(makeRequest(prompt, { ...LONG, seed: BigInt(n) })))
  h.device.fault = new Error('the kernel fell over')
  while (h.device.fault !== null) h.scheduler.step()
  h.drain()
  for (const id of [...old, ...next]) h.verify(id)
  const ended = [...old, ...next].filter(id => h.outcomes.get(id)!.error === null)
  t.ok(ended.length >= 3, `${ended.length} of 5 end well`)
  for (const id of ended) t.equal(h.tokens(id).length, 12)
  t.ok(h.replies.get(CALL))
  t.end()
})

t.test('in random order, failed steps leak nothing and end only requests of one kind of weights', t => {
  const command = fc.oneof(
    {
      weight: 5,
      arbitrary: fc.record({
        what: fc.constant('add' as const),
        length: fc.integer({ min: 1, max: 30 }),
        prompt: fc.nat(3),
        out: fc.nat(20),
        copies: fc.constantFrom(1, 1, 3)
      })
    },
    { weight: 8, arbitrary: fc.record({ what: fc.constant('step' as const), count: fc.integer({ min: 1, max: 6 }) }) },
    { weight: 3, arbitrary: fc.record({ what: fc.constant('swap' as const) }) },
    { weight: 3, arbitrary: fc.record({ what: fc.constant('fail' as const) }) },
    { weight: 1, arbitrary: fc.record({ what: fc.constant('endOld' as const) }) },
    { weight: 1, arbitrary: fc.record({ what: fc.constant('retract' as const) }) }
  )
  const setup = fc.record({ overlap: fc.boolean(), pages: fc.integer({ min: 16, max: 64 }) })
  let failures = 0
  let besides = 0
  fc.assert(
    fc.property(setup, fc.array(command, { maxLength: 40, size: 'max' }), (options, commands) => {
      const h = new Harness({ ...options, maxBatchTokens: 16, contextLength: 60 })
      const ids: number[] = []
      let call = CALL
      let weights = 0
      const step = (): void => {
        const isArmed = h.device.fault !== null
        const before = ids.filter(id => h.ended(id)).length
        const onOld = h.scheduler.stats().onOldWeights
        if (h.scheduler.step()) h.scheduler.check()
        if (!isArmed || h.device.fault !== null) return
        failures++
        const live = ids.filter(id => !h.ended(id)).length
        if (onOld > 0 && live > 0 && ids.length - live > before) besides++
      }
      for (const c of commands) {
        if (c.what === 'add') {
          const prompt = Array.from({ length: c.length }, (_, i) => 1 + (c.prompt * 7 + i) % 90)
          for (let i = 0; i < c.copies; i++) {
            ids.push(h.add(makeRequest(prompt, { maxNewTokens: c.out + 1, seed: BigInt(i) })))
          }
        } else if (c.what === 'step') { for (let i = 0; i < c.count; i++) step() }
        else if (c.what === 'swap') {
          if (call > CALL && !h.replies.has(call)) h.scheduler.endOld()
          h.swapKeepingOld(++weights, ++call)
        } else if (c.what === 'endOld') h.scheduler.endOld()
        else if (c.what === 'retract') h.scheduler.dropCache(true)
        else h.device.fault = new Error('the kernel fell over')
        h.scheduler.check()
      }
      while (h.scheduler.busy) step()
      for (const id of ids) {
        h.verify(id)
        if (!h.ended(id)) throw new Error(`request ${id} has not ended`)
      }
      for (let n = CALL + 1; n <= call; n++) if (!h.replies.has(n)) throw new Error(`call ${n} was not answered`)
      if (h.scheduler.stats().usedTokens !== 0) throw new Error('pages are left')
    }),
    { numRuns: 1000 }
  )
  t.ok(failures > 300 && besides > 30, `${failures} failures, ${besides} beside requests that went on`)
  t.end()
})
