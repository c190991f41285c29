import t from 'tap'
import { join } from 'node:path'
import { createEngine } from '../../src/app/create-engine.ts'
import type { GenerateRequest, ScoredRows, TokenEvent } from '../../src/contract/rollout-engine.ts'
import { packageRoot } from '../../src/root.ts'
import { logprobOf, SCORE_ROW } from '../helpers/fake-device.ts'
import { Harness, makeRequest } from '../helpers/scheduler-harness.ts'

const range = (n: number, from = 1): number[] => Array.from({ length: n }, (_, i) => from + i)

/** Other ids at each position, and rows of different lengths. */
function idRows (prompt: number, from: number, width: number, vocab = 100): ScoredRows {
  const ids = Int32Array.from({ length: (prompt - from) * width }, (_, i) => {
    const row = Math.floor(i / width)
    const column = i % width
    return column >= 1 + row % width ? -1 : (row * 31 + column * 7) % vocab
  })
  return { from, width, ids }
}

/** The scores of a request on the fake device whose tokens were all computed by `weights`. */
function expected ({ inputIds, scores }: GenerateRequest, weights = 0): number[] {
  return Array.from(scores!.ids, (id, i) => {
    const tokens = inputIds.subarray(0, scores!.from + Math.floor(i / scores!.width))
    const context = { tokens, weights: Array.from(tokens, () => weights), current: weights }
    return id < 0 ? -Infinity : logprobOf(context, SCORE_ROW.flags, id)
  })
}

function scoresOf (h: Harness, id: number): number[] {
  const { events, error } = h.outcomes.get(id)!
  if (error !== null) throw new Error(error.message)
  const given = events.flatMap(event => event.scores === undefined ? [] : [event.scores])
  if (given.length !== 1 || events[0]!.scores !== given[0]) throw new Error('the first event has the scores')
  return Array.from(given[0]!)
}

t.test('ids of each position are scored in chunks, after prefix hits, next to other scores and decodes', async t => {
  const h = new Harness({ maxBatchTokens: 12, maxRunningRequests: 4 })
  const make = (length: number, from: number, width: number, ...rest: any[]): GenerateRequest => ({
    ...makeRequest(range(length), ...rest),
    scores: idRows(length, from, width)
  })
  const requests = [
    make(41, 1, 3, { maxNewTokens: 2, ignoreEos: true }),
    make(41, 30, 5, { maxNewTokens: 0 }),
    make(41, 9, 2, { maxNewTokens: 3, ignoreEos: true }, { startLen: 20, top: 2, ids: [4, 8] }),
    make(23, 22, 4, { maxNewTokens: 1 }, { startLen: 0, top: 1, ids: [6] }),
    { ...makeRequest(range(9, 60), { maxNewTokens: 9, ignoreEos: true }) }
  ]
  for (let turn = 0; turn < 2; turn++) {
    const ids = requests.map(request => h.add(request))
    h.drain()
    for (const [i, id] of ids.entries()) {
      h.verify(id)
      if (requests[i]!.scores !== undefined) t.same(scoresOf(h, id), expected(requests[i]!))
    }
  }
})

t.test('scores are computed again after new weights, and go on after a pause that takes the KV', async t => {
  const h = new Harness({ maxBatchTokens: 8, maxRunningRequests: 1 })
  const request = { ...makeRequest(range(30), { maxNewTokens: 1 }), scores: idRows(30, 1, 3) }
  const updated = h.add(request)
  h.scheduler.step()
  h.scheduler.pause('in_place')
  h.scheduler.shut(1, false)
  h.openWith(1)
  h.scheduler.resume()
  h.drain()
  t.same(scoresOf(h, updated), expected(request, 1), 'none of the old weights')
  const again = { ...request, inputIds: Int32Array.from(range(30, 40)) }
  const retracted = h.add(again)
  h.scheduler.step()
  h.scheduler.step()
  h.scheduler.pause('retract')
  h.scheduler.resume()
  h.drain()
  t.same(scoresOf(h, retracted), expected(again, 1))
  const aborted = h.add({ ...request, inputIds: Int32Array.from(range(30, 60)) })
  h.scheduler.step()
  h.scheduler.abort(aborted)
  t.same(h.outcomes.get(aborted)!.events.map(event => event.scores), [undefined], 'none that is incomplete')
})

t.test('ids that do not fit the prompt or the vocabulary are refused', async t => {
  const h = new Harness()
  const cases: [ScoredRows, RegExp][] = [
    [{ from: 0, width: 1, ids: new Int32Array(3) }, /first position is 0; expected 1 to 2/],
    [{ from: 3, width: 1, ids: new Int32Array(0) }, /first position is 3/],
    [{ from: 1, width: 2, ids: new Int32Array(3) }, /got 3 for 2 positions of 2/],
    [{ from: 2, width: 0, ids: new Int32Array(0) }, /positions of 0/],
    [{ from: 1, width: 2, ids: Int32Array.of(1, 2, 3, 100) }, /row 1 has 100 at 1; expected a token id from 0 to 99/],
    [{ from: 1, width: 2, ids: Int32Array.of(-1, 2, 3, 4) }, /row 0 has 2 at 1; .* or -1 at the end of a short row/],
    [{ from: 1, width: 2, ids: Int32Array.of(-2, 2, 3, 4) }, /row 0 has -2 at 0/]
  ]
  for (const [scores, message] of cases) {
    const { error } = h.outcomes.get(h.add({ ...makeRequest([1, 2, 3], { maxNewTokens: 0 }), scores }))!
    t.match(error, { code: 'INVALID_REQUEST', message })
  }
})

t.test('the engine scores chosen ids as it scores the same ids at every position', async t => {
  const engine = await createEngine(join(packageRoot, 'test/goldens/qwen3'), {
    threads: 1,
    maxTotalTokens: 512,
    maxPrefillTokens: 32
  })
  t.teardown(async () => {
    await engine.close()
  })
  const prompt = range(70).map(i => (i * 7) % 250)
  const scores = idRows(70, 5, 6, engine.info.vocabSize)
  const all = range(engine.info.vocabSize, 0)
  const events: TokenEvent[] = []
  const request = { ...makeRequest(prompt, { maxNewTokens: 1 }, { startLen: 0, ids: all }), scores }
  for await (const event of engine.generate(request)) events.push(event)
  const { input, scores: got } = events[0]!
  t.same(
    Array.from(got!),
    Array.from(scores.ids, (id, i) => id < 0 ? -Infinity : input!.ids.at(5 + Math.floor(i / 6))![id]![0])
  )
})
