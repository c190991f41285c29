import t from 'tap'
import { Harness, makeRequest } from '../helpers/scheduler-harness.ts'
import type { HarnessOptions } from '../helpers/scheduler-harness.ts'
import type { SamplingParams } from '../../src/contract/rollout-engine.ts'

const LONG = { maxNewTokens: 12, ignoreEos: true }

/** A harness whose device notes the new tokens of each step that begins. */
function noting (options: HarnessOptions = {}): { h: Harness, begun: number[][] } {
  const h = new Harness(options)
  const begun: number[][] = []
  const begin = h.device.begin.bind(h.device)
  h.device.begin = batch => {
    begun.push([...batch.tokens])
    begin(batch)
  }
  return { h, begun }
}

t.test('a step begins before the one before has ended, with the tokens that it will give', async t => {
  const { h, begun } = noting()
  const ids = [1, 2].map(n => h.add(makeRequest([n, 5, 6], LONG)))
  h.scheduler.step()
  t.equal(h.device.underWay, 1)
  t.same(begun, [[1, 5, 6, 2, 5, 6], [~0, ~1]])
  h.drain()
  t.equal(begun.length, 12, 'the length is known: no step for tokens that nobody wants')
  for (const id of ids) h.verify(id)
})

t.test('the rest of a long prompt follows while its first chunk is computed', async t => {
  const { h, begun } = noting({ maxBatchTokens: 12 })
  const prompt = Array.from({ length: 26 }, (_, i) => i + 1)
  const id = h.add(makeRequest(prompt, { maxNewTokens: 3, ignoreEos: true }))
  h.scheduler.step()
  t.same(begun, [prompt.slice(0, 12), prompt.slice(12, 24)])
  h.drain()
  t.same(begun.slice(2), [prompt.slice(24), [~0], [~0]])
  h.verify(id)
})

t.test('a request that ends by a token leaves the step behind it, and its pages are used again at once', async t => {
  const { h } = noting({ pages: 8, vocabSize: 5 })
  const ids = Array.from(
    { length: 30 },
    (_, i) => h.add(makeRequest([1 + i % 4, 2, 3], { maxNewTokens: 9, seed: BigInt(i), ignoreEos: i % 3 === 0 }))
  )
  h.drain()
  for (const id of ids) h.verify(id)
  t.ok(ids.some(id => h.outcomes.get(id)!.events.at(-1)!.finish!.type === 'stop'))
  t.equal(h.scheduler.stats().usedTokens, 0)
})

t.test('steps run one by one where the next one depends on a token, and without overlap', async t => {
  const alone = async (sampling: Partial<SamplingParams>, options: HarnessOptions = {}): Promise<void> => {
    const { h, begun } = noting(options)
    const ids = [h.add(makeRequest([1, 2], LONG)), h.add(makeRequest([3, 4], { ...LONG, ...sampling }))]
    while (h.scheduler.busy) {
      h.scheduler.step()
      t.equal(h.device.underWay, 0)
    }
    t.ok(begun.flat().every(token => token >= 0))
    for (const id of ids) if (sampling.badWords === undefined) h.verify(id)
  }
  await alone({ frequencyPenalty: 0.5 })
  await alone({ repetitionPenalty: 1.5 })
  await alone({ badWords: [[7, 8]] })
  await alone({}, { overlap: false })
})

t.test('banned end tokens are those of the next token, not of the last that is known', async t => {
  const { h } = noting({ vocabSize: 3 })
  const ids = Array.from(
    { length: 12 },
    (_, i) => h.add(makeRequest([1, 2], { maxNewTokens: 8, minNewTokens: 1 + i % 4, seed: BigInt(i) }))
  )
  h.drain()
  for (const id of ids) h.verify(id)
})

t.test('a pause, a shut in place and a drop of the cache wait for the step under way and take its tokens', async t => {
  for (
    const stop of [
      (h: Harness) => {
        h.scheduler.pause('in_place')
      },
      (h: Harness) => {
        h.scheduler.pause('retract')
      },
      (h: Harness) => {
        h.scheduler.shut(1, false, true)
      },
      (h: Harness) => {
        h.scheduler.dropCache(false)
      }
    ]
  ) {
    const { h } = noting()
    const id = h.add(makeRequest([1, 2, 3], LONG))
    for (let i = 0; i < 3; i++) h.scheduler.step()
    t.equal(h.device.underWay, 1)
    stop(h)
    t.equal(h.device.underWay, 0)
    t.equal(h.tokens(id).length, 4)
    h.verify(id)
  }
})

t.test('a gate in place that waits behind another one shuts when no step is under way', async t => {
  const { h } = noting()
  const id = h.add(makeRequest([1, 2, 3], LONG))
  h.scheduler.step()
  h.scheduler.shut(1, false)
  h.scheduler.shut(2, false, true)
  h.scheduler.cancelShut(1)
  // The harness throws if a step is under way at the reply.
  h.scheduler.step()
  t.equal(h.replies.get(2), true)
  h.scheduler.open({ set: 0, epoch: 0, version: '0', flushCache: false, torn: null, asleep: null })
  h.drain()
  h.verify(id)
})

t.test('a settle waits for the step that still has an ended request, and other requests go on meanwhile', async t => {
  const { h, begun } = noting()
  const ids = [1, 2].map(n => h.add(makeRequest([n, 2, 3], LONG)))
  h.settle(1)
  t.ok(h.replies.has(1), 'no step has begun')
  h.scheduler.step()
  h.scheduler.abort(ids[0]!)
  h.settle(2)
  h.settle(3)
  t.equal(h.device.underWay, 1)
  t.notOk(h.replies.has(2))
  h.scheduler.step()
  t.equal(h.replies.get(2), true)
  t.equal(h.replies.get(3), true)
  t.equal(h.device.underWay, 1, 'the step after it has begun before it has ended')
  t.same(begun.at(-1), [~1], 'the step under way has no request that ended')
  h.drain()
  h.verify(ids[1]!)
})

t.test('a pause answers a settle', async t => {
  const { h } = noting()
  const id = h.add(makeRequest([1, 2, 3], LONG))
  h.scheduler.step()
  h.settle(1)
  h.scheduler.pause('in_place')
  t.equal(h.replies.get(1), true)
  h.scheduler.resume()
  h.drain()
  h.verify(id)
})

t.test('a token has the label under which its step began', async t => {
  const { h } = noting()
  const id = h.add(makeRequest([1, 2, 3], LONG))
  h.scheduler.step()
  h.scheduler.setVersion('other')
  for (let i = 0; i < 3; i++) h.scheduler.step()
  t.same(h.outcomes.get(id)!.events.map(event => event.weightVersion), ['0', '0', 'other', 'other'])
})

t.test('when the last request is aborted, the step under way ends before anyone hears of it', async t => {
  const { h } = noting()
  const ids = [1, 2].map(n => h.add(makeRequest([n, 2, 3], LONG)))
  h.scheduler.step()
  h.scheduler.abort(ids[0]!)
  t.equal(h.device.underWay, 1)
  h.scheduler.abort(ids[1]!)
  t.equal(h.device.underWay, 0)
  for (const id of ids) t.match(h.outcomes.get(id)!.events.at(-1)!.finish, { type: 'abort' })
  t.equal(h.scheduler.stats().usedTokens, 0)
})

t.test('requests that enter while a step is under way give the tokens that they give alone', async t => {
  const alone = (n: number): number[] => {
    const h = new Harness()
    const id = h.add(makeRequest([n, 2, 3, 4, 5], LONG, { startLen: 0, top: 2, ids: [n] }))
    h.drain()
    return h.tokens(id)
  }
  const { h } = noting()
  const ids: number[] = []
  for (let n = 1; n <= 6; n++) {
    ids.push(h.add(makeRequest([n, 2, 3, 4, 5], LONG, { startLen: 0, top: 2, ids: [n] })))
    h.scheduler.step()
    h.scheduler.step()
  }
  // One leaves with its prompt's scores under way.
  const late = h.add(makeRequest([9, 2, 3, 4, 5], LONG, { startLen: 0, top: 3, ids: [1, 2] }))
  h.scheduler.step()
  h.scheduler.abort(late)
  h.drain()
  for (const [i, id] of ids.entries()) {
    t.same(h.tokens(id), alone(i + 1))
    h.verify(id)
  }
})
