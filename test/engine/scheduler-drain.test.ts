import t from 'tap'
import fc from 'fast-check'
import { Harness, makeRequest } from '../helpers/scheduler-harness.ts'

const LONG = { maxNewTokens: 12, ignoreEos: true }
const PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]

t.test('a drain finishes running requests, begins none, and then pauses', async (t) => {
  const h = new Harness({ maxRunningRequests: 1 })
  const running = h.add(makeRequest(PROMPT, LONG))
  h.scheduler.step()
  const waiting = h.add(makeRequest([9, 8, 7], LONG))
  h.scheduler.drain(1)
  const late = h.add(makeRequest([6, 5, 4], LONG))
  t.equal(h.replies.get(1), undefined)
  t.match(h.scheduler.stats(), { paused: null, pausing: true }, 'not yet')
  h.drain()
  t.ok(h.ended(running))
  h.verify(running)
  t.equal(h.replies.get(1), true)
  t.match(h.scheduler.stats(), { paused: 'in_place', pausing: false })
  t.same([h.tokens(waiting), h.tokens(late)], [[], []])
  t.notOk(h.scheduler.busy)
  h.scheduler.resume()
  h.drain()
  for (const id of [waiting, late]) h.verify(id)
  t.equal(h.replies.size, 1)
})

t.test('a drain finishes retracted requests, too', async (t) => {
  const h = new Harness({ maxRunningRequests: 2 })
  const ids = [h.add(makeRequest(PROMPT, LONG)), h.add(makeRequest([9, 8, 7, 6], LONG))]
  for (let i = 0; i < 4; i++) h.scheduler.step()
  h.scheduler.dropCache(true)
  t.equal(h.scheduler.stats().running, 0)
  h.scheduler.drain(1)
  t.equal(h.replies.get(1), undefined, 'they have shown tokens')
  h.drain()
  t.equal(h.replies.get(1), true)
  for (const id of ids) h.verify(id)
})

t.test('an idle engine, a paused one and one that sleeps are drained at once', async (t) => {
  const idle = new Harness()
  idle.scheduler.drain(1)
  t.equal(idle.replies.get(1), true)
  t.equal(idle.scheduler.stats().paused, 'in_place')
  const paused = new Harness()
  paused.add(makeRequest(PROMPT, LONG))
  paused.scheduler.step()
  paused.scheduler.pause('retract')
  paused.scheduler.drain(1)
  t.equal(paused.replies.get(1), true)
  t.equal(paused.scheduler.stats().paused, 'retract', 'as it was paused')
  const asleep = new Harness()
  asleep.scheduler.shut(1, false)
  asleep.openWith(0, { asleep: 'asleep' })
  asleep.scheduler.drain(2)
  t.equal(asleep.replies.get(2), true)
})

t.test('a resume cancels a drain, an abort ends it, and a pause completes it', async (t) => {
  const begin = () => {
    const h = new Harness()
    const id = h.add(makeRequest(PROMPT, LONG))
    h.scheduler.step()
    h.scheduler.drain(1)
    return { h, id }
  }
  const resumed = begin()
  resumed.h.scheduler.resume()
  t.equal(resumed.h.replies.get(1), false)
  const next = resumed.h.add(makeRequest([9, 8], LONG))
  resumed.h.drain()
  t.equal(resumed.h.scheduler.stats().paused, null, 'and the drain does not return')
  for (const id of [resumed.id, next]) resumed.h.verify(id)
  const aborted = begin()
  aborted.h.scheduler.abortAll()
  t.equal(aborted.h.replies.get(1), true)
  t.equal(aborted.h.scheduler.stats().paused, 'in_place')
  const paused = begin()
  paused.h.scheduler.pause('in_place')
  t.equal(paused.h.replies.get(1), true)
  paused.h.scheduler.resume()
  paused.h.drain()
  paused.h.verify(paused.id)
  const two = begin()
  two.h.scheduler.drain(2)
  two.h.drain()
  t.same([two.h.replies.get(1), two.h.replies.get(2)], [true, true])
})

t.test('a drain and a write that wait for the same requests both complete', async (t) => {
  const h = new Harness()
  const id = h.add(makeRequest(PROMPT, LONG))
  h.scheduler.step()
  h.scheduler.shut(1, false)
  h.scheduler.drain(2)
  h.drain()
  t.ok(h.ended(id))
  t.same([h.replies.get(1), h.replies.get(2)], [true, true])
  h.openWith(1)
  t.equal(h.scheduler.stats().paused, 'in_place')
})

t.test('dropping the cache keeps pages of running requests, and no other request finds them', async (t) => {
  const h = new Harness()
  const done = h.add(makeRequest(PROMPT, { maxNewTokens: 1, ignoreEos: true }))
  h.drain()
  const running = h.add(makeRequest(PROMPT, LONG))
  for (let i = 0; i < 3; i++) h.scheduler.step()
  t.equal(h.outcomes.get(running)!.events[0]!.cachedTokens, 4, "the first request's page")
  h.scheduler.dropCache(false)
  h.scheduler.check()
  const again = h.add(makeRequest(PROMPT, LONG))
  h.drain()
  t.equal(h.outcomes.get(again)!.events[0]!.cachedTokens, 0)
  t.equal(h.outcomes.get(running)!.events.at(-1)!.retractions, 0)
  for (const id of [done, running, again]) h.verify(id)
})

t.test('retracted requests are computed again with the same tokens, also behind a gate or a pause', async (t) => {
  for (const how of ['runs', 'paused', 'shut'] as const) {
    const h = new Harness()
    const id = h.add(makeRequest(PROMPT, LONG))
    for (let i = 0; i < 4; i++) h.scheduler.step()
    if (how !== 'runs') h.scheduler.pause('in_place')
    if (how === 'shut') h.scheduler.shut(1, false)
    h.scheduler.dropCache(true)
    h.scheduler.check()
    t.equal(h.scheduler.stats().usedTokens, 0, how)
    t.equal(h.scheduler.stats().cachedTokens, 0, how)
    if (how === 'shut') h.openWith(0)
    h.scheduler.resume()
    h.drain()
    t.equal(h.outcomes.get(id)!.events.at(-1)!.retractions, 1)
    t.equal(h.outcomes.get(id)!.events.at(-1)!.cachedTokens, 0)
    h.verify(id)
  }
})

t.test('in any order of calls every drain resolves once, and tokens are those of an undisturbed run', async () => {
  fc.assert(
    fc.property(
      fc.array(fc.constantFrom('add', 'step', 'step', 'step', 'drain', 'resume', 'drop', 'retract', 'pause'), {
        maxLength: 60
      }),
      calls => {
        const h = new Harness({ maxRunningRequests: 2, pages: 24 })
        const ids: number[] = []
        let drains = 0
        for (const [i, name] of calls.entries()) {
          if (name === 'add') {
            ids.push(h.add(makeRequest([1 + i % 7, 2, 3, 4, 5, 6], LONG)))
          }
          if (name === 'step') h.scheduler.step()
          if (name === 'drain') h.scheduler.drain(drains++)
          if (name === 'resume') h.scheduler.resume()
          if (name === 'drop' || name === 'retract') h.scheduler.dropCache(name === 'retract')
          if (name === 'pause') h.scheduler.pause('in_place')
          h.scheduler.check()
        }
        h.scheduler.resume()
        h.drain()
        for (const id of ids) h.verify(id)
        if (h.replies.size !== drains) throw new Error(`${drains} drains, ${h.replies.size} replies`)
      }
    )
  )
})
