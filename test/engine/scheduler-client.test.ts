import { extname } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import type { RefitError } from '../../src/errors.ts'
import { SchedulerClient } from '../../src/engine/scheduler-client.ts'
import type { SchedulerClientOptions } from '../../src/engine/scheduler-client-options.ts'
import type { StartData } from '../../src/engine/messages.ts'
import type { GenerateRequest, TokenEvent } from '../../src/contract/rollout-engine.ts'
import { EXIT_SEED, LOST_SEED, STUCK_SEED, THROW_SEED } from '../helpers/fakes/fake-worker.ts'
import type { Held } from '../helpers/fakes/fake-worker.ts'
import { Harness, makeRequest } from '../helpers/scheduler-harness.ts'

// The real client and worker loop on real threads, with the fake device.

const mayBegin = new Int32Array(new SharedArrayBuffer(4)).fill(-1)

const DATA: StartData & Held = {
  core: {
    device: 'cpu',
    ranks: 1,
    threads: 1,
    dtype: 'float32',
    params: [],
    pages: 8192,
    pageSize: 4,
    recipe: {
      hiddenSize: 1,
      layers: 1,
      heads: 1,
      kvHeads: 1,
      headDim: 2,
      vocabSize: 100,
      rmsNormEps: 1e-6,
      normPlacement: 'pre',
      qkNorm: 'none',
      activation: 'silu',
      roundOnce: false,
      qkvBias: false,
      oBias: false,
      tieWordEmbeddings: false,
      ropeInvFreq: new Float64Array(1),
      ropeScale: 1,
      sparseLayers: new Uint8Array(1),
      experts: 0,
      expertsPerToken: 0,
      normTopkProb: false
    }
  },
  scheduler: {
    contextLength: 8192,
    vocabSize: 100,
    eosTokenIds: [0],
    maxRunningRequests: 4,
    maxQueuedRequests: 100,
    maxBatchTokens: 32,
    overlap: true,
    epoch: 0,
    version: '0',
    torn: null
  },
  vocabulary: null,
  randomSeed: null,
  mayBegin
}

/** Pauses between two steps of a request. The steps wait for the pause, so the request cannot end before it. */
async function pauseAmid (events: AsyncIterator<TokenEvent>): Promise<void> {
  mayBegin[0] = 2
  await events.next()
  const paused = client.pause('in_place')
  Atomics.store(mayBegin, 0, -1)
  Atomics.notify(mayBegin, 0)
  await paused
}

async function start (
  t: Test,
  options: SchedulerClientOptions = {}
): Promise<{ client: SchedulerClient, failures: RefitError[] }> {
  const failures: RefitError[] = []
  const client = await SchedulerClient.start(DATA, {
    url: new URL(`../helpers/fakes/fake-worker${extname(import.meta.url)}`, import.meta.url),
    onFailure: (error) => failures.push(error),
    ...options
  })
  t.teardown(async () => {
    await client.close()
  })
  return { client, failures }
}

// A worker takes a second to start from sources, so tests that leave it alive share one.
const { client } = await start(t)

function request (rid: string, ...rest: Parameters<typeof makeRequest>): GenerateRequest {
  return { ...makeRequest(...rest), rid }
}

async function collect (stream: AsyncIterable<TokenEvent>): Promise<TokenEvent[]> {
  const events: TokenEvent[] = []
  for await (const event of stream) events.push(event)
  return events
}

const tokens = (events: TokenEvent[]): number[] => events.flatMap((event) => event.tokens)
// Longer than any test runs.
const LONG = { maxNewTokens: 8000, ignoreEos: true }

t.test('events that crossed the threads are those that the scheduler gave', async (t) => {
  t.equal(client.core, 41)
  const requests = [
    request('a', [1, 2, 3, 4, 5], { maxNewTokens: 9 }, { startLen: 0, top: 2, ids: [5] }),
    request('b', [1, 2, 3, 4, 5], { maxNewTokens: 9, seed: 2n ** 64n - 1n, ignoreEos: true }, { raw: true }),
    request('c', [1, 2, 3, 4, 5], { maxNewTokens: 0 }, { startLen: 3, ids: [1, 2] }),
    request('d', [9], { maxNewTokens: 20, stopTokenIds: [1, 2, 3, 4] }),
    request('e', [9], { maxNewTokens: 5, ignoreEos: true, temperature: 0 }, { top: 1 })
  ]
  const got = await Promise.all(requests.map(async (r) => await collect(client.generate(r))))
  const h = new Harness({ maxRunningRequests: 4, contextLength: 8192 })
  const ids = requests.map((r) => h.add(r))
  h.drain()
  ids.forEach((id, i) => {
    const expected = h.outcomes.get(id)!.events.map((event, j) => {
      const { times } = got[i]![j]!
      t.same(times === undefined ? [] : Object.keys(times), j === 0 ? ['queueMs', 'prefillMs'] : [], 'times come once')
      return { ...event, cachedTokens: got[i]![0]!.cachedTokens, ...times === undefined ? {} : { times } }
    })
    t.same(got[i], expected, requests[i]!.rid)
  })
})

t.test('a view of a large buffer is sent without the rest of the buffer', async (t) => {
  const ids = new Int32Array(1000).subarray(500, 503)
  ids.set([7, 8, 9])
  const seen = await collect(client.generate({ ...request('a', []), inputIds: ids }))
  t.equal(seen[0]!.promptTokens, 3)
})

t.test('leaving the loop early aborts the request and frees its rid and pages', async (t) => {
  for await (const event of client.generate(request('a', [1, 2, 3], LONG))) {
    if (event.tokens.length > 0) break
  }
  t.equal(
    tokens(await collect(client.generate(request('a', [1, 2, 3], { maxNewTokens: 4, ignoreEos: true })))).length,
    4
  )
  t.equal(client.stats.running, 0)
  t.equal(client.stats.usedTokens, 0)
  t.ok(client.stats.generationTokens < 8000)
})

t.test('a live rid is refused a second time', async (t) => {
  const first = client.generate(request('a', [1], LONG))
  await first.next()
  await t.rejects(client.generate(request('a', [2])).next(), {
    code: 'INVALID_REQUEST',
    message: /Duplicate request ID detected: a/
  })
  await first.return!()
})

t.test('a refused request throws its code at the first read, and other requests continue', async (t) => {
  const other = collect(client.generate(request('b', [1], { maxNewTokens: 5, ignoreEos: true })))
  await t.rejects(collect(client.generate(request('a', [1, 1000]))), {
    code: 'INVALID_REQUEST',
    message: /input_ids\[1\] is 1000/
  })
  t.equal((await other).length, 5)
})

t.test('abort and abortAll end requests with the tokens that they have', async (t) => {
  const a = collect(client.generate(request('a', [1], LONG)))
  const b = client.generate(request('b', [2], LONG))
  const c = collect(client.generate(request('c', [3], LONG)))
  await b.next()
  t.equal(client.abort('nobody'), false)
  t.equal(client.abort('a'), true)
  t.same((await a).at(-1)!.finish, { type: 'abort', message: 'Aborted' })
  t.equal(client.abortAll(), 2)
  t.equal((await c).at(-1)!.finish!.type, 'abort')
  const rest = await collect(b)
  t.equal(rest.at(-1)!.finish!.type, 'abort')
  t.equal(client.abortAll(), 0)
})

t.test('a pause shows in the stats and lets requests wait until it ends', async (t) => {
  const events = client.generate(request('a', [1, 2], { maxNewTokens: 30, ignoreEos: true }))
  await pauseAmid(events)
  const { steps } = client.stats
  t.ok(steps > 0)
  const waiting = collect(client.generate(request('b', [3], { maxNewTokens: 2, ignoreEos: true })))
  t.equal(await client.flush(5), false, 'not idle')
  t.same([client.stats.paused, client.stats.running, client.stats.queued, client.stats.steps], [
    'in_place',
    1,
    1,
    steps
  ])
  await client.pause('retract')
  t.same([client.stats.paused, client.stats.running, client.stats.queued, client.stats.steps], ['retract', 0, 2, steps])
  await client.resume()
  t.equal(tokens(await collect(events)).length, 29)
  t.equal((await waiting).length, 2)
  t.equal(await client.flush(0), true)
  t.equal(client.stats.cachedTokens, 0)
  await client.pause('abort')
  await client.resume()
})

t.test('a flush with time waits until the engine is idle', async (t) => {
  const events = client.generate(request('a', [1, 2, 3, 4, 5], { maxNewTokens: 30, ignoreEos: true }))
  await events.next()
  const [flushed, rest] = await Promise.all([client.flush(60_000), collect(events)])
  t.equal(flushed, true)
  t.equal(rest.length, 29)
  t.equal(client.stats.cachedTokens, 0)
})

t.test('the gate shuts after running requests, fails with DEADLINE, and opens with a new label', async (t) => {
  const events = client.generate(request('a', [1, 2], { maxNewTokens: 8000, ignoreEos: true }))
  await events.next()
  await t.rejects(client.shut({ abort: false, deadlineMs: 5 }), { code: 'DEADLINE', message: /within 5 ms/ })
  t.ok((await events.next()).value.tokens.length === 1, 'it goes on')
  const gate = await client.shut({ abort: true, deadlineMs: 60_000 })
  const rest = await collect(events)
  t.equal(rest.at(-1)!.finish!.type, 'abort')
  const late = collect(client.generate(request('b', [1, 2], { maxNewTokens: 3, ignoreEos: true })))
  await client.resume()
  t.equal(client.stats.queued, 1)
  await gate.open({ set: 0, epoch: 1, version: 'new', flushCache: true, torn: null, asleep: null })
  t.same((await late).map((event) => event.weightVersion), ['new', 'new', 'new'])
  await t.rejects(gate.open({ set: 0, epoch: 1, version: 'new', flushCache: true, torn: null, asleep: null }), {
    message: /opened twice/
  })
  client.relabel('newer')
  t.equal((await collect(client.generate(request('c', [1], { maxNewTokens: 1 }))))[0]!.weightVersion, 'newer')
})

t.test('a gate that was waited for keeps the next one waiting, although nothing runs any more', async (t) => {
  const events = client.generate(request('a', [1, 2], { maxNewTokens: 8000, ignoreEos: true }))
  await events.next()
  const gate = await client.shut({ abort: true, deadlineMs: 60_000 })
  await collect(events)
  let shut = 0
  const opening = { set: 0, epoch: 1, version: '0', flushCache: false, torn: null, asleep: null }
  const others = [1, 2].map(async () => {
    const next = await client.shut({ abort: false, deadlineMs: 60_000 })
    shut++
    return next
  })
  // The worker has replied to a later call, so it has read the requests for the gate.
  for (let i = 0; i < 3; i++) await client.dropCache(false)
  t.equal(shut, 0)
  await gate.open(opening)
  await (await others[0]!).open(opening)
  await (await others[1]!).open(opening)
  t.equal((await collect(client.generate(request('b', [1], { maxNewTokens: 2, ignoreEos: true })))).length, 2)
})

t.test('torn weights reach readers as ENGINE_TORN, and a later gate heals', async (t) => {
  const torn = await client.shut({ abort: false, deadlineMs: 60_000 })
  const waiting = collect(client.generate(request('a', [1])))
  await client.resume()
  await Promise.all([
    t.rejects(waiting, { code: 'ENGINE_TORN', message: 'norm is torn' }),
    torn.open({ set: 0, epoch: 1, version: '0', flushCache: true, torn: 'norm is torn', asleep: null })
  ])
  await t.rejects(collect(client.generate(request('b', [1]))), { code: 'ENGINE_TORN' })
  const gate = await client.shut({ abort: false, deadlineMs: 60_000 })
  await gate.open({ set: 0, epoch: 2, version: '2', flushCache: true, torn: null, asleep: null })
  t.equal((await collect(client.generate(request('c', [1], { maxNewTokens: 2, ignoreEos: true })))).length, 2)
})

for (
  const [how, seed, message] of [['exits', EXIT_SEED, /ended with code 7/], [
    'throws',
    THROW_SEED,
    /has a defect/
  ]] as const
) {
  t.test(`a worker that ${how} fails every request and call with ENGINE_CLOSED, once`, async (t) => {
    const { client, failures } = await start(t)
    const other = collect(client.generate(request('a', [1], LONG)))
    const flush = client.flush(60_000)
    const killer = collect(client.generate(request('b', [1], { ...LONG, seed })))
    await Promise.all([other, flush, killer].map(async (promise) => {
      await t.rejects(promise as Promise<unknown>, { code: 'ENGINE_CLOSED', message })
    }))
    t.equal(failures.length, 1)
    t.equal(client.closed!.code, 'ENGINE_CLOSED')
    await t.rejects(client.pause('abort'), { code: 'ENGINE_CLOSED' })
    await t.rejects(client.generate(request('c', [1])).next(), { code: 'ENGINE_CLOSED' })
    t.equal(client.abort('a'), false)
    t.equal(client.abortAll(), 0)
    client.relabel('x')
    await client.close()
  })
}

for (
  const [how, seed, watchdogMs, message] of [
    [
      'loses its device',
      LOST_SEED,
      60_000,
      /^rank 1, GPU 3 \(H100\): the kernel "attention" failed; requests in the step: .*b/
    ],
    [
      'does not end',
      STUCK_SEED,
      400,
      /^a step has not ended within 0\.4 s \(--watchdog-timeout\); requests in the step: .*b/
    ]
  ] as const
) {
  t.test(`a step that ${how} fails every request and call with DEVICE_LOST and names its requests`, async (t) => {
    const { client, failures } = await start(t, { watchdogMs })
    // All of them are queued before the first step.
    await client.pause('in_place')
    const other = collect(client.generate(request('a', [1], LONG)))
    const flush = client.flush(60_000)
    const killer = collect(client.generate(request('b', [1], { ...LONG, seed })))
    const resumed = client.resume().catch(() => {})
    await Promise.all([other, flush, killer].map(async (promise) => {
      await t.rejects(promise as Promise<unknown>, { code: 'DEVICE_LOST', message })
    }))
    await resumed
    t.equal(failures.length, 1)
    t.equal(failures[0]!.code, 'DEVICE_LOST')
    await t.rejects(client.generate(request('c', [1])).next(), { code: 'DEVICE_LOST' })
    await t.rejects(client.shut({ abort: false, deadlineMs: 1000 }), { code: 'DEVICE_LOST' })
    client.lost('again')
    t.equal(failures.length, 1)
    await client.close()
  })
}

t.test('a device that is lost in a write also fails running requests', async (t) => {
  const { client, failures } = await start(t, { watchdogMs: 60_000 })
  const running = collect(client.generate(request('a', [1], LONG)))
  await client.pause('in_place')
  client.lost('rank 0, GPU 0 (H100): the copy of a write failed')
  await t.rejects(running, { code: 'DEVICE_LOST', message: 'rank 0, GPU 0 (H100): the copy of a write failed' })
  t.match(failures, [{ code: 'DEVICE_LOST' }])
})

t.test('the gate reports how many requests hold KV', async (t) => {
  const events = client.generate(request('a', [1, 2], { maxNewTokens: 50, ignoreEos: true }))
  await pauseAmid(events)
  const gate = await client.shut({ abort: false, deadlineMs: 60_000 })
  t.equal(gate.holders, 1)
  await gate.open({ set: 0, epoch: 2, version: '2', flushCache: false, torn: null, asleep: null })
  await client.pause('retract')
  const free = await client.shut({ abort: false, deadlineMs: 60_000 })
  t.equal(free.holders, 0)
  await free.open({ set: 0, epoch: 2, version: '2', flushCache: false, torn: null, asleep: 'released' })
  await t.rejects(collect(client.generate(request('b', [1]))), { code: 'ENGINE_ASLEEP', message: 'released' })
  await client.resume()
  t.equal(client.stats.queued, 1)
  const last = await client.shut({ abort: false, deadlineMs: 60_000 })
  await last.open({ set: 0, epoch: 2, version: '2', flushCache: false, torn: null, asleep: null })
  t.equal(tokens(await collect(events)).length, 49)
})

t.test('close fails running requests, ends the thread and may be called twice', async (t) => {
  const { client, failures } = await start(t)
  const events = client.generate(request('a', [1], LONG))
  await events.next()
  const rest = collect(events)
  await Promise.all([
    t.rejects(rest, { code: 'ENGINE_CLOSED', message: /shutting down/ }),
    client.close(),
    client.close()
  ])
  t.equal(failures.length, 0)
  await t.rejects(client.resume(), { code: 'ENGINE_CLOSED' })
})

t.test('a worker file that cannot be run is an error, not a hang', async (t) => {
  await t.rejects(SchedulerClient.start(DATA, { url: new URL('./no-such-worker.js', import.meta.url) }), {
    code: 'INTERNAL',
    message: /could not be started/
  })
})
