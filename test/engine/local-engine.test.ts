import t from 'tap'
import type { Test } from 'tap'
import { cpSync, mkdtempSync, rmSync, symlinkSync, truncateSync, mkdirSync, readdirSync, renameSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createEngine } from '../../src/app/create-engine.ts'
import type { EngineOptions } from '../../src/app/create-engine.ts'
import type { LocalEngine } from '../../src/engine/local-engine.ts'
import type { GenerateRequest, TokenEvent } from '../../src/contract/rollout-engine.ts'
import { packageRoot } from '../../src/root.ts'
import { openDiskSource } from '../../src/sources/disk/disk.ts'
import { seedSource } from '../../src/engine/seed-source.ts'
import { makeRequest } from '../helpers/scheduler-harness.ts'

// The engine with its native core, on a small random model.

const MODEL = join(packageRoot, 'test/goldens/qwen3')

async function start (t: Test, options: EngineOptions = {}): Promise<LocalEngine> {
  const engine = await createEngine(MODEL, { threads: 1, maxTotalTokens: 2048, maxRunningRequests: 8, ...options })
  t.teardown(async () => {
    await engine.close()
  })
  return engine
}

let made = 0
function request (...rest: Parameters<typeof makeRequest>): GenerateRequest {
  return { ...makeRequest(...rest), rid: `r${made++}` }
}

async function collect (stream: AsyncIterable<TokenEvent>): Promise<TokenEvent[]> {
  const events: TokenEvent[] = []
  for await (const event of stream) events.push(event)
  return events
}

const tokens = (events: TokenEvent[]): number[] => events.flatMap((event) => event.tokens)
const logprobs = (events: TokenEvent[]): number[] =>
  events.flatMap((event) => event.logprobs.map(([logprob]) => logprob))
const prompt = (n: number, from = 1): number[] => Array.from({ length: n }, (_, i) => (from + i * 7) % 250)
const SHORT = { maxNewTokens: 12, ignoreEos: true }

// A worker takes a second to start from sources, so most tests share an engine.
const loads: [number, number][] = []
const engine = await start(t, {
  servedModelName: 'tiny',
  weightVersion: 'step-0',
  randomSeed: 42,
  onProgress: (done, total) => loads.push([done, total])
})

t.test('an engine reports its info, generates, and derives seeds from its own seed', async (t) => {
  t.match(engine.info, {
    modelPath: MODEL,
    servedModelName: 'tiny',
    architecture: 'Qwen3ForCausalLM',
    device: 'cpu',
    ranks: 1,
    threads: 1,
    kvTokens: 2048,
    maxRunningRequests: 8
  })
  t.ok(engine.info.weightBytes > 0 && engine.info.kvBytes > 0)
  t.ok(loads.length > 0 && loads.at(-1)![0] === loads.at(-1)![1])
  t.equal(engine.weights.state, 'current')
  t.ok(engine.ready)
  const events = await collect(engine.generate(request(prompt(20), { ...SHORT, seed: null }, { startLen: 0, top: 2 })))
  t.equal(events[0]!.seed, seedSource(42n)())
  t.equal(tokens(events).length, 12)
  t.equal(events[0]!.weightVersion, 'step-0')
  t.equal(events[0]!.input!.logprobs.length, 20)
  t.ok(logprobs(events).every((logprob) => logprob <= 0 && Number.isFinite(logprob)))
})

t.test('tokens and logprobs do not depend on batch, chunks, cache hits, retraction or threads', async (t) => {
  const wanted: Array<Parameters<typeof makeRequest>> = [
    [prompt(70), { ...SHORT, maxNewTokens: 40 }, { startLen: 40, top: 1 }],
    [prompt(70), { ...SHORT, maxNewTokens: 40, temperature: 0 }, {}],
    [prompt(33, 9), { ...SHORT, maxNewTokens: 30, seed: 5n, topK: 20, topP: 0.9 }, {}],
    [prompt(5, 3), { ...SHORT, maxNewTokens: 60, frequencyPenalty: 0.7, repetitionPenalty: 1.2, logitBias: [[7, 3]] }, {
      raw: true,
      ids: [1, 2]
    }]
  ]
  const requests = (): GenerateRequest[] => wanted.map((args) => request(...args))
  const facts = (
    events: TokenEvent[]
  ): unknown => [tokens(events), events.map((e) => [e.logprobs, e.top, e.ids, e.input])]

  const expected: unknown[] = []
  for (const r of requests()) {
    expected.push(facts(await collect(engine.generate(r))))
    t.equal(await engine.flushCache(), true)
  }
  t.same(
    await Promise.all(requests().map(async (r) => facts(await collect(engine.generate(r))))),
    expected,
    'in a batch, with prefixes shared'
  )
  t.same(
    await Promise.all(requests().map(async (r) => facts(await collect(engine.generate(r))))),
    expected,
    'from the prefix cache'
  )
  t.ok(engine.stats.prefixHitTokens > 0)

  // The requests may have ended before they could be retracted.
  for (let turn = 0; turn < 50 && engine.stats.retractions === 0; turn++) {
    const running = requests().map((r) => engine.generate(r)[Symbol.asyncIterator]())
    const first = await Promise.all(running.map(async (stream) => (await stream.next()).value as TokenEvent))
    await engine.pause('retract')
    await engine.resume()
    const rest = await Promise.all(
      running.map(async (stream) => await collect({ [Symbol.asyncIterator]: () => stream }))
    )
    t.same(first.map((event, i) => facts([event, ...rest[i]!])), expected, 'retracted')
  }
  t.ok(engine.stats.retractions > 0)

  const chunked = await start(t, { maxPrefillTokens: 16, maxRunningRequests: 4, threads: 2 })
  t.same(
    await Promise.all(requests().map(async (r) => facts(await collect(chunked.generate(r))))),
    expected,
    'in chunks, on two threads'
  )

  const small = await start(t, { maxTotalTokens: 176, maxRunningRequests: 4 })
  t.same(
    await Promise.all(requests().map(async (r) => facts(await collect(small.generate(r))))),
    expected,
    'in a small KV cache'
  )
})

t.test('numbers beyond float32 fail only their own request, and the smallest ones give finite logprobs', async (t) => {
  const beside = collect(engine.generate(request(prompt(30), { ...SHORT, maxNewTokens: 30 })))
  for (
    const sampling of [{ temperature: 1e39 }, { repetitionPenalty: 1e-40 }, { repetitionPenalty: 1e39 }, {
      logitBias: [[3, 1e39]] as [number, number][]
    }, { topK: -1 }]
  ) {
    await t.rejects(collect(engine.generate(request(prompt(9), { ...SHORT, ...sampling }))), {
      code: 'INVALID_REQUEST'
    }, JSON.stringify(sampling))
  }
  t.equal(tokens(await beside).length, 30)
  const least = await collect(
    engine.generate(
      request(prompt(9), { ...SHORT, temperature: 1e-6, repetitionPenalty: 1e-6, topP: 1e-40, minP: 1e-46 }, {})
    )
  )
  t.equal(logprobs(least).length, 12)
  t.ok(logprobs(least).every(Number.isFinite))
  const greedy = tokens(await collect(engine.generate(request(prompt(9), { ...SHORT, temperature: 0 }))))
  t.same(
    tokens(await collect(engine.generate(request(prompt(9), { ...SHORT, temperature: 1e-40 })))),
    greedy,
    'a temperature too small to divide by is greedy'
  )
})

t.test('scores of a prompt are the logprobs that its tokens had when they were generated', async (t) => {
  const events = await collect(engine.generate(request(prompt(9), { ...SHORT, temperature: 1 }, {})))
  const scored = await collect(
    engine.generate(request([...prompt(9), ...tokens(events)], { maxNewTokens: 0 }, { startLen: 9 }))
  )
  t.same(scored[0]!.input!.logprobs, events.map((event) => event.logprobs[0]))
})

t.test('scrambled weights are torn until an update writes them, and then tokens are as before', async (t) => {
  const before = await engine.checksums()
  const expected = tokens(await collect(engine.generate(request(prompt(40), SHORT))))
  await engine.scrambleWeights()
  t.equal(engine.weights.state, 'torn')
  t.notOk(engine.ready)
  await t.rejects(collect(engine.generate(request(prompt(40), SHORT))), { code: 'ENGINE_TORN' })
  const source = await openDiskSource(MODEL, { roots: [MODEL] })
  const update = await engine.update()
  await update.write(source)
  await update.commit({ version: 'healed' })
  await source.close()
  t.same(await engine.checksums(), before)
  const events = await collect(engine.generate(request(prompt(40), SHORT)))
  t.same(tokens(events), expected)
  t.equal(events[0]!.weightVersion, 'healed')
  t.equal(events[0]!.cachedTokens, 0)
  engine.setWeightVersion('again')
  t.equal((await collect(engine.generate(request([1], SHORT))))[0]!.weightVersion, 'again')
  t.equal(engine.weightVersion, 'again')
})

t.test('a model in a Hugging Face cache, whose files are links, is loaded', async (t) => {
  const folder = mkdtempSync(join(tmpdir(), 'refit-engine-'))
  t.teardown(() => {
    rmSync(folder, { recursive: true })
  })
  const snapshot = join(folder, 'models--a--b/snapshots/main')
  const blobs = join(folder, 'models--a--b/blobs')
  mkdirSync(blobs, { recursive: true })
  cpSync(MODEL, snapshot, { recursive: true })
  for (const name of readdirSync(snapshot)) {
    renameSync(join(snapshot, name), join(blobs, name))
    symlinkSync(join('../../blobs', name), join(snapshot, name))
  }
  const engine = await createEngine(snapshot, { threads: 1, maxTotalTokens: 64 })
  t.equal(engine.info.contextLength, 64, 'no longer than the KV cache')
  t.ok(engine.ready)
  await engine.close()
  t.notOk(engine.ready)
  await t.rejects(collect(engine.generate(request([1]))), { code: 'ENGINE_CLOSED' })
})

t.test('a model that cannot be loaded is refused with the reason, and no thread is left', async (t) => {
  const folder = mkdtempSync(join(tmpdir(), 'refit-engine-'))
  t.teardown(() => {
    rmSync(folder, { recursive: true })
  })
  await t.rejects(createEngine(folder), { code: 'MODEL_CONFIG' })
  cpSync(MODEL, folder, { recursive: true })
  await t.rejects(createEngine(folder, { contextLength: 1e9 }), {
    code: 'CONFIG',
    message: /--context-length: 1000000000 tokens are more than the model's/
  })
  await t.rejects(createEngine(folder, { tp: 3 }), { code: 'CONFIG', message: /--tp/ })
  await t.rejects(createEngine(folder, { isa: 'abacus', maxTotalTokens: 64 }), { code: 'CONFIG', message: /abacus/ })
  await t.rejects(createEngine(folder, { memFraction: 1e-12 }), { code: 'CONFIG', message: /--mem-fraction/ })
  const [file] = readdirSync(folder).filter((name) => name.endsWith('.safetensors'))
  truncateSync(join(folder, file!), 1000)
  await t.rejects(createEngine(folder), { code: 'CHECKPOINT_FORMAT', message: `${folder}: ${file}: ` })
  rmSync(join(folder, file!))
  const { message } = await createEngine(folder).catch((error: Error) => error) as Error
  t.equal(message.split(folder).length, 2, `the folder is said once: ${message}`)
})
