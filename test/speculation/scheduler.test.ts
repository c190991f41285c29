import t from 'tap'
import { Harness, makeRequest } from '../helpers/scheduler-harness.ts'

const LONG = { maxNewTokens: 24, ignoreEos: true, seed: 5n }
const range = (from: number, count: number): number[] => Array.from({ length: count }, (_, i) => from + i)

/** Ends one request of a prompt, so that its output is guessed when it is asked for again. */
function taught (h: Harness, prompt: number[], sampling = {}): void {
  h.add(makeRequest(prompt, { ...LONG, ...sampling }))
  h.drain()
}

t.test('an output that was seen before takes a few steps', async t => {
  const h = new Harness({ drafts: 8 })
  taught(h, [1, 2, 3])
  const { steps } = h.scheduler.stats()
  t.equal(steps, 24)
  const id = h.add(makeRequest([1, 2, 3], LONG))
  h.drain()
  h.verify(id)
  const { steps: after, drafts, draftTokens, acceptedTokens } = h.scheduler.stats()
  t.ok(after - steps < 12, `${after - steps} steps`)
  t.ok(drafts > 0 && acceptedTokens === draftTokens && acceptedTokens >= 24 - (after - steps))
  t.equal(h.outcomes.get(id)!.events.length, 24, 'an event for each token')
})

t.test('guesses evict nothing from the prefix cache', async t => {
  const accepted = (pages: number): number => {
    const h = new Harness({ drafts: 16, pages, pageSize: 1, maxBatchTokens: 64 })
    taught(h, [1, 2, 3])
    taught(h, range(10, 40), { maxNewTokens: 2 })
    t.equal(h.scheduler.stats().cachedTokens, Math.min(pages, 26 + 41))
    const id = h.add(makeRequest([1, 2, 3], LONG))
    h.drain()
    h.verify(id)
    return h.scheduler.stats().acceptedTokens
  }
  t.equal(accepted(60), 0, 'all pages are in the cache')
  t.ok(accepted(100) > 10)
})

t.test('pages of wrong guesses are given back', async t => {
  // Few tokens, so that three that match are followed by others.
  const h = new Harness({ drafts: 16, pageSize: 1, pages: 200, vocabSize: 3 })
  taught(h, [1, 2, 1], { maxNewTokens: 60 })
  h.scheduler.shut(1, false)
  h.openWith(1)
  const id = h.add(makeRequest([1, 2, 1], LONG))
  while (h.scheduler.busy) {
    h.scheduler.step()
    h.scheduler.check()
    if (!h.ended(id) && h.device.underWay === 0) {
      t.ok(h.scheduler.stats().usedTokens <= 3 + h.tokens(id).length)
    }
  }
  h.verify(id)
  const { draftTokens, acceptedTokens } = h.scheduler.stats()
  t.ok(draftTokens > acceptedTokens, `${draftTokens - acceptedTokens} guesses were wrong`)
})

t.test('nothing is computed beyond the longest output', async t => {
  const h = new Harness({ drafts: 16 })
  taught(h, [1, 2, 3], { maxNewTokens: 60 })
  let end = 0
  const begin = h.device.begin.bind(h.device)
  h.device.begin = batch => {
    end = Math.max(end, batch.startPos[0]! + batch.tokens.length)
    begin(batch)
  }
  const id = h.add(makeRequest([1, 2, 3], LONG))
  h.drain()
  h.verify(id)
  t.equal(end, 26, 'the last token needs no KV')
})

t.test('a prefill goes on beside guesses, by a page in each step at least', async t => {
  const h = new Harness({ drafts: 16, maxBatchTokens: 8, maxRunningRequests: 2, pages: 64, vocabSize: 40 })
  taught(h, [1, 2, 3])
  const first = h.add(makeRequest([1, 2, 3], LONG))
  h.scheduler.step()
  const second = h.add(makeRequest(range(5, 30), { maxNewTokens: 2 }))
  let steps = 0
  while (h.outcomes.get(second)!.events.length === 0 && steps < 20) {
    h.scheduler.step()
    steps++
  }
  t.ok(steps <= 10, `${steps} steps for 30 tokens of prompt`)
  t.ok(h.device.maxTokens <= 8, `${h.device.maxTokens} tokens in a step`)
  h.drain()
  for (const id of [first, second]) h.verify(id)
})

t.test('a failed step fails its requests, and the next ones are guessed again', async t => {
  const h = new Harness({ drafts: 8 })
  taught(h, [1, 2, 3])
  const lost = h.add(makeRequest([1, 2, 3], LONG))
  h.scheduler.step()
  h.device.fault = new Error('fault')
  h.drain()
  t.match(h.outcomes.get(lost)!.error, { code: 'INTERNAL' })
  const id = h.add(makeRequest([1, 2, 3], LONG))
  h.drain()
  h.verify(id)
  t.ok(h.scheduler.stats().acceptedTokens > 0)
})
