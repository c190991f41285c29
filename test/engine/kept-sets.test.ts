import t from 'tap'
import { join } from 'node:path'
import { createEngine } from '../../src/app/create-engine.ts'
import type { GenerateRequest, KeptSet, TokenEvent } from '../../src/contract/rollout-engine.ts'
import { MOST_KEPT } from '../../src/native/step.ts'
import { packageRoot } from '../../src/root.ts'
import { keptAfter } from '../helpers/fake-device.ts'
import { Harness, makeRequest } from '../helpers/scheduler-harness.ts'

const range = (n: number, from = 1): number[] => Array.from({ length: n }, (_, i) => from + i)
const masked = (...rest: Parameters<typeof makeRequest>): GenerateRequest => ({ ...makeRequest(...rest), kept: true })
const plain = (sets: KeptSet[]): [number[], number][] => sets.map(({ ids, logprob }) => [Array.from(ids), logprob])

/** The kept sets of a request on the fake device, computed again from its tokens. */
function expected (h: Harness, id: number): [number[], number][] {
  const { request } = h.outcomes.get(id)!
  const all = [...request.inputIds, ...h.tokens(id)]
  return h.tokens(id).map((token, i) => {
    const tokens = all.slice(0, request.inputIds.length + i)
    return [keptAfter({ tokens, weights: tokens.map(() => 0), current: 0 }, token), -token / 8]
  })
}

t.test('each token has its own kept set, among rows without, with scores and after retractions', async t => {
  const h = new Harness({ pages: 16, pageSize: 4, maxBatchTokens: 64 })
  const ids = range(4).map(seed => {
    const make = seed === 2 ? makeRequest : masked
    return h.add(make(range(5, seed * 10), { seed: BigInt(seed), maxNewTokens: 30, ignoreEos: true, topK: 9 }, {
      top: 1,
      startLen: 0
    }))
  })
  h.drain()
  t.ok(h.scheduler.stats().retractions > 0)
  for (const [i, id] of ids.entries()) {
    h.verify(id)
    const { events } = h.outcomes.get(id)!
    const sets = events.flatMap(event => event.kept ?? [])
    if (i === 1) t.same(sets, [], 'not requested')
    else t.same(plain(sets), expected(h, id))
    t.ok(sets.every(({ ids }) => ids.byteLength === ids.buffer.byteLength), 'no view of all of the step')
  }
})

t.test('a set that is too large ends its request with the reason, and no other request', async t => {
  const h = new Harness()
  h.device.keptMost = MOST_KEPT + 1
  const [large, other] = [
    h.add(masked([1, 2], { maxNewTokens: 3, ignoreEos: true, topP: 0.9 })),
    h.add(makeRequest([3, 4], { maxNewTokens: 3, ignoreEos: true }))
  ] as const
  h.drain()
  t.match(h.outcomes.get(large)!.error, {
    code: 'INVALID_REQUEST',
    message: /^sampling mask: 8193 tokens are kept for output token 1; at most 8192 .* set top_k/
  })
  t.equal(h.tokens(other).length, 3)
  h.device.keptMost = 2
  const next = h.add(masked([1, 2], { maxNewTokens: 3, ignoreEos: true, topP: 0.9 }))
  h.drain()
  t.equal(h.outcomes.get(next)!.events.flatMap(event => event.kept!).length, 3)
})

t.test('the ids of a request have one budget', async t => {
  const h = new Harness({ contextLength: 4096, pages: 2048 })
  h.device.keptMost = MOST_KEPT
  const id = h.add(masked([1], { maxNewTokens: 3000, ignoreEos: true, topP: 0.9 }))
  h.drain()
  t.equal(h.tokens(id).length, 2048, '2 ** 24 ids')
  t.match(h.outcomes.get(id)!.error, { code: 'INVALID_REQUEST', message: /16785408 ids .* at most 16777216/ })
})

t.test('a request whose sets would be the whole vocabulary is refused', async t => {
  const h = new Harness()
  t.match(h.outcomes.get(h.add(masked([1])))!.error, { code: 'INVALID_REQUEST', message: /every token .* is kept/ })
  for (const bounded of [{ topK: 5 }, { topP: 0.9 }, { minP: 0.1 }, { temperature: 0 }]) {
    const id = h.add(masked([1], { maxNewTokens: 1, ...bounded }))
    h.drain()
    t.equal(h.outcomes.get(id)!.error, null)
  }
})

t.test('the engine keeps what top_k, top_p and min_p keep of the distribution that it reports', async t => {
  const engine = await createEngine(join(packageRoot, 'test/goldens/qwen3'), { threads: 1, maxTotalTokens: 512 })
  t.teardown(async () => {
    await engine.close()
  })
  const { vocabSize } = engine.info
  let made = 0
  const run = async (sampling: Parameters<typeof makeRequest>[1]): Promise<TokenEvent[]> => {
    const events: TokenEvent[] = []
    const request = masked([5, 6, 7], { maxNewTokens: 24, ignoreEos: true, ...sampling }, { top: vocabSize })
    for await (const event of engine.generate({ ...request, rid: `r${made++}` })) events.push(event)
    return events
  }
  let wide = 0
  for (const limits of [{ topK: 7, topP: 0.6 }, { topP: 0.4 }, { minP: 0.3 }, { topK: 12, topP: 0.9, minP: 0.05 }]) {
    const { topK = vocabSize, topP = 1, minP = 0 } = limits as { topK?: number, topP?: number, minP?: number }
    for (const event of await run({ ...limits, temperature: 0.7 })) {
      const ranked = event.top[0]!.slice(0, topK)
      const total = ranked.reduce((sum, [logprob]) => sum + Math.exp(logprob), 0)
      let before = 0
      const kept = ranked.filter(([logprob], rank) => {
        const isKept = rank === 0 || (before < topP * total && logprob >= ranked[0]![0] + Math.log(minP))
        before += Math.exp(logprob)
        return isKept
      })
      const [set] = event.kept!
      t.same(Array.from(set!.ids), kept.map(([, id]) => id))
      const mass = kept.reduce((sum, [logprob]) => sum + Math.exp(logprob), 0)
      t.ok(Math.abs(set!.logprob - (event.logprobs[0]![0] - Math.log(mass))) < 1e-5)
      t.ok(set!.ids.includes(event.tokens[0]!))
      if (kept.length > 1) wide++
    }
  }
  t.ok(wide > 48, `${wide} sets with several tokens`)
  for (const event of await run({ temperature: 0 })) t.same(plain(event.kept!), [[event.tokens, 0]])
})
