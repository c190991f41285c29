import t from 'tap'
import { PageAllocator } from '../../src/engine/sequences/pages.ts'
import { PrefixCache } from '../../src/engine/sequences/prefix-cache.ts'
import { Harness, makeRequest } from '../helpers/scheduler-harness.ts'

const range = (n: number, from = 1): number[] => Array.from({ length: n }, (_, i) => from + i)

t.test('a request alone, in a batch, in chunks and after a prefix hit gives the same tokens', async (t) => {
  const request = makeRequest(range(23), { maxNewTokens: 12, ignoreEos: true })
  const alone = new Harness()
  const id = alone.add(request)
  alone.drain()
  alone.verify(id)
  const expected = alone.tokens(id)
  t.equal(expected.length, 12)

  const again = alone.add(request)
  alone.drain()
  t.same(alone.tokens(again), expected)
  t.equal(alone.outcomes.get(again)!.events[0]!.cachedTokens, 20, 'all whole pages but never the last token')

  const batch = new Harness({ maxBatchTokens: 1, maxRunningRequests: 4 })
  const others = [3, 9, 17].map((n) => batch.add(makeRequest(range(n, 40), { maxNewTokens: 20 })))
  const same = batch.add(request)
  batch.drain()
  t.ok(batch.device.maxTokens <= 8, 'no step exceeds the budget of all decodes and a page')
  t.same(batch.tokens(same), expected)
  for (const other of [...others, same]) batch.verify(other)
})

t.test('a cached prompt of whole pages still computes its last page', async (t) => {
  const h = new Harness()
  const request = makeRequest(range(8), { maxNewTokens: 2, ignoreEos: true })
  const first = h.add(request)
  h.drain()
  const second = h.add(request)
  h.drain()
  t.equal(h.outcomes.get(second)!.events[0]!.cachedTokens, 4)
  t.same(h.tokens(second), h.tokens(first))
})

t.test('a finished output is a prefix for the next turn', async (t) => {
  const h = new Harness()
  const first = h.add(makeRequest(range(6), { maxNewTokens: 7, ignoreEos: true }))
  h.drain()
  const turn = [...range(6), ...h.tokens(first)]
  const second = h.add(makeRequest([...turn, 50, 51], { maxNewTokens: 2, ignoreEos: true }))
  h.drain()
  t.equal(h.outcomes.get(second)!.events[0]!.cachedTokens, 12, 'the last token of the output had no KV yet')
  h.verify(second)
})

t.test('samples of one prompt share its prefill', async (t) => {
  const h = new Harness({ maxBatchTokens: 16 })
  const ids = range(8).map((seed) =>
    h.add(makeRequest(range(41), { seed: BigInt(seed), maxNewTokens: 3, ignoreEos: true }))
  )
  h.drain()
  for (const id of ids) h.verify(id)
  t.equal(h.device.computed, 41 + 7 * 1 + 8 * 2, 'the prompt once, its last token once per sample, and the decodes')
  t.same(ids.map((id) => h.outcomes.get(id)!.events[0]!.cachedTokens), [0, ...new Array(7).fill(40)])
  t.equal(new Set(ids.map((id) => h.tokens(id).join())).size, 8)
})

t.test('samples that share less than a page do not wait for each other', async (t) => {
  const h = new Harness()
  const ids = [1n, 2n].map((seed) => h.add(makeRequest([5, 6, 7], { seed, maxNewTokens: 2, ignoreEos: true })))
  h.scheduler.step()
  for (const id of ids) t.equal(h.tokens(id).length, 1)
})

t.test('a chunk of a prompt ends at a page', async (t) => {
  const h = new Harness({ maxBatchTokens: 11, maxRunningRequests: 1 })
  const id = h.add(makeRequest(range(30), { maxNewTokens: 1 }))
  h.scheduler.step()
  t.equal(h.device.computed, 8)
  h.drain()
  h.verify(id)
})

t.test('no more prompts are begun than a step has tokens for', async (t) => {
  const h = new Harness({ maxBatchTokens: 16 })
  for (let n = 1; n <= 5; n++) h.add(makeRequest(new Array(40).fill(n), { maxNewTokens: 1 }))
  h.scheduler.step()
  t.equal(h.scheduler.stats().running, 1)
  h.drain()
})

t.test('a request does not begin if the expected output of the running ones would not fit', async (t) => {
  const h = new Harness({ pages: 12, pageSize: 4, maxBatchTokens: 64 })
  for (let n = 1; n <= 2; n++) h.add(makeRequest([n, n], { maxNewTokens: 40, ignoreEos: true }))
  h.scheduler.step()
  t.same([h.scheduler.stats().running, h.scheduler.stats().queued], [1, 1])
  h.drain()
  for (const id of h.outcomes.keys()) h.verify(id)
})

t.test('prompts whose first pages have the same hash do not wait for each other', async (t) => {
  const h = new Harness({ pageSize: 2, vocabSize: 2 ** 31 - 1, maxBatchTokens: 64 })
  const cache = new PrefixCache(new PageAllocator(1), 2)
  const root = cache.root('')
  const seen = new Map<number, number[]>()
  for (let i = 0;; i++) {
    const tokens = [(Math.imul(i, 2654435761) >>> 1) % (2 ** 31 - 1), i]
    const hash = cache.hash(root, Int32Array.from(tokens))
    const other = seen.get(hash)
    seen.set(hash, tokens)
    if (other === undefined) continue
    const ids = [other, tokens].map((page) => h.add(makeRequest([...page, 1], { maxNewTokens: 2 })))
    h.scheduler.step()
    t.equal(h.scheduler.stats().queued, 0)
    h.drain()
    for (const id of ids) h.verify(id)
    return
  }
})

t.test('if the leader of a shared prefill is aborted, its waiters continue', async (t) => {
  const h = new Harness({ maxBatchTokens: 12, maxRunningRequests: 8 })
  const ids = range(4).map((seed) =>
    h.add(makeRequest(range(30), { seed: BigInt(seed), maxNewTokens: 2, ignoreEos: true }))
  )
  h.scheduler.step()
  t.equal(h.scheduler.stats().running, 1)
  t.equal(h.scheduler.stats().queued, 3)
  h.scheduler.abort(ids[0]!)
  h.scheduler.abort(ids[2]!)
  h.drain()
  t.same(ids.map((id) => h.tokens(id).length), [0, 2, 0, 2])
  for (const id of ids) h.verify(id)
})

t.test('cache salts keep equal prompts apart', async (t) => {
  const h = new Harness()
  for (const salt of [undefined, 'a', 'b', 'a']) h.add(makeRequest(range(13), { maxNewTokens: 1 }, null, salt))
  h.drain()
  t.same([...h.outcomes.values()].map((o) => o.events[0]!.cachedTokens), [0, 0, 0, 12])
})

t.test('requests finish at eos, stop ids, the token limit and the context length', async (t) => {
  const h = new Harness({ vocabSize: 6, contextLength: 40, eosTokenIds: [0, 1], maxRunningRequests: 64, pages: 400 })
  for (let seed = 0n; seed < 20n; seed++) {
    h.add(makeRequest([2, 3], { seed, maxNewTokens: 6 }))
    h.add(makeRequest([2, 3], { seed, maxNewTokens: 500, ignoreEos: true, stopTokenIds: [4] }))
    h.add(makeRequest([2, 3], { seed, maxNewTokens: 500, ignoreEos: true }))
    h.add(makeRequest([2, 3], { seed, maxNewTokens: 500, minNewTokens: 9, stopTokenIds: [5] }))
  }
  h.drain()
  const seen = new Set<string>()
  for (const [id, { request, events }] of h.outcomes) {
    h.verify(id)
    const finish = events.at(-1)!.finish!
    seen.add(finish.type === 'stop' ? `stop ${finish.matched}` : `length ${request.sampling.ignoreEos}`)
    if (request.sampling.minNewTokens > 0) t.ok(h.tokens(id).slice(0, 9).every((token) => ![0, 1, 5].includes(token)))
  }
  t.same([...seen].sort(), ['length true', 'stop 0', 'stop 1', 'stop 4', 'stop 5'])
})

t.test('the context length ends a request with reason length', async (t) => {
  const h = new Harness({ contextLength: 16 })
  const id = h.add(makeRequest(range(10), { maxNewTokens: 500, ignoreEos: true }))
  h.drain()
  t.same(h.outcomes.get(id)!.events.at(-1)!.finish, { type: 'length', length: 6 })
})

t.test('prompts are scored in chunks, with or without generated tokens and cache hits', async (t) => {
  const h = new Harness({ maxBatchTokens: 1, maxRunningRequests: 8 })
  const logprobs = { top: 2, ids: [9, 3] }
  const ids = [
    h.add(makeRequest(range(21), { maxNewTokens: 0 }, { ...logprobs, startLen: 0 })),
    h.add(makeRequest(range(21), { maxNewTokens: 3 }, { ...logprobs, startLen: 10 })),
    h.add(makeRequest(range(21), { maxNewTokens: 3 }, { ...logprobs, startLen: 21 })),
    h.add(makeRequest([4], { maxNewTokens: 2 }, { startLen: 0 })),
    h.add(makeRequest([4], { maxNewTokens: 0 }, { startLen: 1 })),
    h.add(makeRequest(range(9), { maxNewTokens: 0 })),
    h.add(
      makeRequest(range(21), {
        maxNewTokens: 4,
        temperature: 0,
        frequencyPenalty: 0.5,
        repetitionPenalty: 1.5,
        logitBias: [[3, 2.5], [8, -1]]
      }, { raw: true, top: 1 })
    )
  ]
  h.drain()
  for (const id of ids) h.verify(id)
  t.equal(h.outcomes.get(ids[0]!)!.events.length, 1)
  t.equal(h.outcomes.get(ids[0]!)!.events[0]!.input!.logprobs.length, 21)
  t.same(h.outcomes.get(ids[0]!)!.events[0]!.finish, { type: 'length', length: 0 })

  const hit = h.add(makeRequest(range(21), { maxNewTokens: 3 }, { ...logprobs, startLen: 10 }))
  const none = h.add(makeRequest(range(21), { maxNewTokens: 0 }, { ...logprobs, startLen: 0 }))
  h.drain()
  h.verify(hit)
  h.verify(none)
  t.equal(h.outcomes.get(hit)!.events[0]!.cachedTokens, 8, 'position 9 must be computed to score position 10')
  t.equal(h.outcomes.get(none)!.events[0]!.cachedTokens, 0)
})

t.test('requests that can never run are refused with numbers, and nothing is left of them', async (t) => {
  const h = new Harness({ pages: 4, pageSize: 4, contextLength: 64, maxRunningRequests: 1, maxQueuedRequests: 2 })
  const refused: [ReturnType<typeof makeRequest>, string, RegExp][] = [
    [makeRequest([]), 'INVALID_REQUEST', /empty/],
    [makeRequest([1, 100]), 'INVALID_REQUEST', /input_ids\[1\] is 100; expected .* 99/],
    [makeRequest([1, -1]), 'INVALID_REQUEST', /input_ids\[1\] is -1/],
    [makeRequest([1], { logitBias: [[100, 1]] }), 'INVALID_REQUEST', /logit_bias\[0\]/],
    [makeRequest([1], { temperature: 1e39 }), 'INVALID_REQUEST', /temperature must be a finite float32, got 1e\+39/],
    [makeRequest([1], { temperature: NaN }), 'INVALID_REQUEST', /temperature/],
    [makeRequest([1], { topP: 1e-46 }), 'INVALID_REQUEST', /top_p/],
    [makeRequest([1], { topK: -1 }), 'INVALID_REQUEST', /top_k is -1/],
    [makeRequest([1], { topK: 2 ** 31 }), 'INVALID_REQUEST', /top_k is 2147483648/],
    [makeRequest([1], { minP: NaN }), 'INVALID_REQUEST', /min_p/],
    [makeRequest([1], { frequencyPenalty: 1e39 }), 'INVALID_REQUEST', /frequency_penalty/],
    [makeRequest([1], { presencePenalty: -1e39 }), 'INVALID_REQUEST', /presence_penalty/],
    [
      makeRequest([1], { repetitionPenalty: 1e-46 }),
      'INVALID_REQUEST',
      /repetition_penalty must be in \[0\.000001, 2\], got 1e-46/
    ],
    [makeRequest([1], { logitBias: [[5, 1e39]] }), 'INVALID_REQUEST', /logit_bias .* got 1e\+39 for 5/],
    [makeRequest([1], {}, { ids: [4, 1.5] }), 'INVALID_REQUEST', /token_ids_logprob\[1\]/],
    [makeRequest([1], {}, { top: 101 }), 'INVALID_REQUEST', /top_logprobs_num/],
    [
      makeRequest([1], { maxNewTokens: 40 }, { ids: new Array<number>(1e6).fill(1) }),
      'INVALID_REQUEST',
      /1000000 token ids for up to 4[01] positions.*at most/
    ],
    [makeRequest([1], {}, { startLen: 2 }), 'INVALID_REQUEST', /logprob_start_len is 2/],
    [makeRequest(new Array(64).fill(1), { maxNewTokens: 1 }), 'PROMPT_TOO_LONG', /64 tokens.*64 tokens/],
    [makeRequest(new Array(65).fill(1), { maxNewTokens: 0 }), 'PROMPT_TOO_LONG', /65 tokens/],
    [makeRequest(new Array(10).fill(1), { maxNewTokens: 8 }), 'PROMPT_TOO_LONG', /10 tokens.*\(8\) need 17 tokens.*16/]
  ]
  for (const [request, code, message] of refused) {
    const id = h.add(request)
    t.equal(h.outcomes.get(id)!.error!.code, code)
    t.match(h.outcomes.get(id)!.error!.message, message)
  }
  t.notOk(h.scheduler.busy)
  const most = h.add(makeRequest(new Array(10).fill(1), { maxNewTokens: 7, ignoreEos: true }))
  h.drain()
  h.verify(most)
  t.equal(h.tokens(most).length, 7, 'the last token needs no KV')
  h.scheduler.pause('in_place')
  const ids = range(4).map(() => h.add(makeRequest([1])))
  t.same(ids.map((id) => h.outcomes.get(id)!.error?.code), [undefined, undefined, undefined, 'QUEUE_FULL'])
})

t.test('an idle engine accepts at once as many requests as can run, plus the length of its queue', async (t) => {
  for (const maxQueuedRequests of [0, 2]) {
    const h = new Harness({ maxRunningRequests: 3, maxQueuedRequests })
    for (let round = 0; round < 2; round++) {
      const ids = range(3 + maxQueuedRequests + 1).map((i) => h.add(makeRequest([1, i + 1], { maxNewTokens: 2 })))
      t.same(ids.map((id) => h.outcomes.get(id)!.error?.code), [
        ...Array(3 + maxQueuedRequests).fill(undefined),
        'QUEUE_FULL'
      ])
      h.drain()
      for (const id of ids.slice(0, -1)) h.verify(id)
    }
  }
})

t.test('when pages run out, the request with least progress is computed again with the same tokens', async (t) => {
  const h = new Harness({ pages: 16, pageSize: 4, maxBatchTokens: 64 })
  const ids = [1, 2, 3, 4].map((seed) =>
    h.add(makeRequest(range(5, seed * 10), { seed: BigInt(seed), maxNewTokens: 30, ignoreEos: true }, { top: 1 }))
  )
  h.drain()
  for (const id of ids) {
    h.verify(id)
    t.equal(h.tokens(id).length, 30)
  }
  const { retractions } = h.scheduler.stats()
  t.ok(retractions > 0)
  t.equal([...h.outcomes.values()].reduce((sum, o) => sum + o.events.at(-1)!.retractions, 0), retractions)
})

t.test('a full queue of long requests is served in order of arrival without starving anyone', async (t) => {
  const h = new Harness({ pages: 20, pageSize: 4, maxRunningRequests: 3 })
  const ids = range(30).map((n) =>
    h.add(makeRequest(range(1 + (n * 7) % 30), { seed: BigInt(n), maxNewTokens: 1 + (n * 11) % 40 }))
  )
  h.drain()
  for (const id of ids) {
    t.ok(h.ended(id))
    h.verify(id)
  }
})

t.test('a device that throws fails the requests of that step and no other', async (t) => {
  const h = new Harness({ maxRunningRequests: 2 })
  const ids = range(3).map((n) => h.add(makeRequest([n, n, n, n, n], { maxNewTokens: 5, ignoreEos: true })))
  h.scheduler.step()
  h.device.fault = new Error('the kernel fell over')
  h.scheduler.step()
  h.scheduler.check()
  t.same(ids.map((id) => h.outcomes.get(id)!.error), [
    { code: 'INTERNAL', message: 'the device failed in a step: the kernel fell over' },
    { code: 'INTERNAL', message: 'the device failed in a step: the kernel fell over' },
    null
  ])
  h.drain()
  h.verify(ids[2]!)
  t.equal(h.tokens(ids[2]!).length, 5)
  const again = h.add(makeRequest([1, 1, 1, 1, 1], { maxNewTokens: 5, ignoreEos: true }))
  h.drain()
  h.verify(again)
})

t.test('abort ends queued and running requests with the tokens that they have, and frees their pages', async (t) => {
  const h = new Harness({ maxRunningRequests: 1 })
  const [running, queued, last] = [1, 2, 3].map((n) =>
    h.add(makeRequest([n, n], { maxNewTokens: 9, ignoreEos: true }))
  ) as [number, number, number]
  h.scheduler.step()
  h.scheduler.step()
  t.ok(h.scheduler.abort(running))
  t.ok(h.scheduler.abort(queued))
  t.notOk(h.scheduler.abort(running), 'it is gone')
  t.same(h.outcomes.get(running)!.events.at(-1)!.finish, { type: 'abort', message: 'Aborted' })
  t.equal(h.outcomes.get(running)!.events.at(-1)!.completionTokens, 2)
  t.same(h.outcomes.get(queued)!.events.at(-1)!.finish, { type: 'abort', message: 'Abort in waiting queue' })
  h.drain()
  t.equal(h.tokens(last).length, 9)
  h.scheduler.abortAll()
  const stats = h.scheduler.stats()
  t.equal(stats.usedTokens, 0)
})

t.test('seeds are echoed, and drawn for a request without one', async (t) => {
  const h = new Harness()
  const drawn = h.add(makeRequest([1], { seed: null }))
  const large = h.add(makeRequest([1], { seed: 0xffffffffffffffffn }))
  h.drain()
  t.equal(h.outcomes.get(drawn)!.events[0]!.seed, 0x1234567890abcdefn)
  t.equal(h.outcomes.get(large)!.events[0]!.seed, 0xffffffffffffffffn)
})

t.test('tokens in use are those in pages of running requests, not those only in the cache', async (t) => {
  const h = new Harness({ pages: 64 })
  const used = (): number[] => [h.scheduler.stats().usedTokens, h.scheduler.stats().cachedTokens]
  h.add(makeRequest(range(23), { maxNewTokens: 6, ignoreEos: true }))
  h.drain()
  t.same(used(), [0, 28], 'idle, with a full cache')
  const shared = h.add(makeRequest([...range(8), 50, 51], { maxNewTokens: 9, ignoreEos: true }))
  h.scheduler.step()
  t.same(used(), [12, 28], 'two pages of the cache and one of its own')
  h.add(makeRequest([...range(8), 60, 61], { maxNewTokens: 9, ignoreEos: true }))
  h.scheduler.step()
  t.same(used(), [16, 28], 'shared pages count once')
  h.scheduler.flush(1)
  h.scheduler.abort(shared)
  h.scheduler.pause('retract')
  t.equal(used()[0], 0, 'waiting requests hold no pages')
  h.scheduler.resume()
  h.drain()
  t.same(used(), [0, 0])
})

t.test('the first token of a request, and no other event, reports its waiting and prefill times', async (t) => {
  let now = 100
  const h = new Harness({ maxRunningRequests: 1, maxBatchTokens: 4, now: () => now })
  const [first, scored, queued] = [
    makeRequest(range(12), { maxNewTokens: 3, ignoreEos: true }),
    makeRequest(range(3), { maxNewTokens: 0 }, { startLen: 0 }),
    makeRequest([1], { maxNewTokens: 1 })
  ]
    .map((request) => h.add(request)) as [number, number, number]
  now += 7
  h.scheduler.step()
  now += 20
  h.scheduler.pause('retract')
  h.scheduler.resume()
  while (!h.ended(scored)) {
    h.scheduler.step()
    now += 1000
  }
  h.scheduler.abort(queued)
  const times = (id: number): unknown[] => h.outcomes.get(id)!.events.map((event) => event.times)
  t.match(times(first), [{ queueMs: 7, prefillMs: Number }, undefined, undefined])
  const { prefillMs } = h.outcomes.get(first)!.events[0]!.times!
  t.ok(prefillMs >= 20 && prefillMs % 1000 === 20, 'from when it first ran, also after a retraction')
  t.same(times(scored), [{ queueMs: prefillMs + 7 + 3000, prefillMs: 0 }])
  t.same(times(queued), [undefined], 'it never ran')
})
