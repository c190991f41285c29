import t from 'tap'
import { DifferenceTally } from '../../../src/http/samples/difference-tally.ts'
import { digestOf } from '../../../src/http/samples/weights-digest.ts'
import { sealOf } from '../../../src/http/samples/receipt.ts'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import { call, routeApp } from '../../helpers/route-app.ts'

const LOGPROBS = { return_logprob: true, receipt: true }

t.test('a receipt has everything that made the sample, the drawn seed too', async t => {
  const { url, engine } = await routeApp(t)
  const sampling = { max_new_tokens: 3, temperature: 0.5, top_k: 7, stop_token_ids: [9], logit_bias: { 4: 1.5 } }
  const { json } = await call(`${url}/generate`, {
    input_ids: [5, 6],
    rid: 'one',
    sampling_params: sampling,
    ...LOGPROBS
  })
  t.equal(json.meta_info.id, 'one')
  const { status, json: receipt } = await call(`${url}/samples/one`)
  t.equal(status, 200)
  t.match(receipt, {
    receipt: 1,
    id: 'one',
    prompt_ids: [5, 6],
    output_ids: json.output_ids,
    logprobs: json.meta_info.output_token_logprobs.map(([logprob]: [number]) => logprob),
    raw_logprobs: false,
    finish_reason: { type: 'length', length: 3 },
    // The fake engine's draw.
    sampling_params: { ...sampling, sampling_seed: '4242', ignore_eos: false },
    unrepeatable: [],
    weight_versions: [{ version: 'default', start: 0, end: 3 }],
    weights: { state: 'current', digest: digestOf((await engine.checksums()).tensors) },
    lora: null
  })
  t.equal(sealOf(receipt), receipt.seal)
  t.not(sealOf({ ...receipt, prompt_ids: [5, 7] }), receipt.seal)
  t.equal(sealOf(Object.fromEntries(Object.entries(receipt).reverse())), receipt.seal, 'in any order of fields')
})

t.test('a receipt and /server_info say whether the same request gives the same bits', async t => {
  for (const deterministic of [true, false]) {
    const engine = new FakeEngine({ info: { device: 'cuda', deterministic } })
    const { url } = await routeApp(t, { engine })
    await call(`${url}/generate`, { input_ids: [5], rid: 'one', ...LOGPROBS })
    t.equal((await call(`${url}/samples/one`)).json.device.exact, deterministic)
    t.match((await call(`${url}/server_info`)).json, { enable_deterministic_inference: deterministic })
  }
  const engine = new FakeEngine({ info: { device: 'remote', deterministic: true } })
  const { url } = await routeApp(t, { engine })
  await call(`${url}/generate`, { input_ids: [5], rid: 'one', ...LOGPROBS })
  t.equal((await call(`${url}/samples/one`)).json.device.exact, false, 'nobody knows what computed it')
})

t.test('a sample is kept only if its request or the server asks for it', async t => {
  const asked = await routeApp(t)
  await call(`${asked.url}/generate`, { input_ids: [5], rid: 'plain' })
  t.match(await call(`${asked.url}/samples/plain`), {
    status: 404,
    json: { error: { code: 'NOT_FOUND', message: /requests with "receipt": true are kept/ } }
  })
  const all = await routeApp(t, { keepSamples: 'all' })
  await call(`${all.url}/generate`, { input_ids: [5], rid: 'plain' })
  await call(`${all.url}/v1/completions`, { prompt: [5], model: 'fake', rid: 'completion', max_tokens: 2 })
  t.match((await call(`${all.url}/samples/plain`)).json, { logprobs: null, prompt_ids: [5] })
  t.match((await call(`${all.url}/samples/completion`)).json, { sampling_params: { max_new_tokens: 2 } })
  const none = await routeApp(t, { samplesMemory: 0, keepSamples: 'all' })
  t.match(await call(`${none.url}/generate`, { input_ids: [5], ...LOGPROBS }), {
    status: 400,
    json: { error: { code: 'UNSUPPORTED', message: /receipt: this server keeps none \(--samples-memory 0\)/ } }
  })
  t.equal((await call(`${none.url}/v1/completions`, { prompt: [5], model: 'fake', receipt: true })).status, 400)
  await call(`${none.url}/generate`, { input_ids: [5], rid: 'plain' })
  t.equal((await call(`${none.url}/samples/plain`)).status, 404)
})

t.test('receipts and the truth meter need the API key', async t => {
  const { url } = await routeApp(t, { apiKey: 'secret', adminApiKey: 'more' })
  const headers = { authorization: 'Bearer secret', 'content-type': 'application/json' }
  const body = JSON.stringify({ input_ids: [5], rid: 'one', ...LOGPROBS })
  await call(`${url}/generate`, undefined, { method: 'POST', body, headers })
  for (const path of ['/samples/one', '/truth']) {
    t.equal((await call(url + path)).status, 401, path)
    t.equal((await call(url + path, undefined, { headers })).status, 200, path)
  }
})

t.test('the oldest samples go when the memory is full', async t => {
  const { url } = await routeApp(t, { samplesMemory: 4096 })
  for (let i = 0; i < 8; i++) {
    await call(`${url}/generate`, { input_ids: [5], rid: `s${i}`, sampling_params: { max_new_tokens: 2 }, ...LOGPROBS })
  }
  const kept: number[] = []
  for (let i = 0; i < 8; i++) if ((await call(`${url}/samples/s${i}`)).status === 200) kept.push(i)
  t.ok(kept.length > 0 && kept.length < 8, `${kept}`)
  t.same(kept, [5, 6, 7].slice(-kept.length), 'the newest')
  const { text } = await call(`${url}/metrics`)
  t.match(text, new RegExp(`refit:kept_samples{model_name="fake"} ${kept.length}\n`))
  const bytes = Number(/refit:kept_sample_bytes{[^}]*} (\d+)/.exec(text)![1])
  t.ok(bytes > 0 && bytes <= 4096, `${bytes}`)
  await call(`${url}/generate`, { input_ids: Array(4000).fill(5), rid: 'large', ...LOGPROBS })
  t.equal((await call(`${url}/samples/large`)).status, 404, 'one that is larger than all of the memory')
  t.equal((await call(`${url}/samples/s7`)).status, 200, 'evicts no other')
})

t.test('a digest is computed once for each version, and is lost with the weights', async t => {
  const engine = new FakeEngine()
  let reads = 0
  const { checksums } = engine
  engine.checksums = async () => {
    reads++
    return await checksums.call(engine)
  }
  const { url } = await routeApp(t, { engine })
  for (const rid of ['a', 'b']) await call(`${url}/generate`, { input_ids: [5], rid, ...LOGPROBS })
  t.match((await call(`${url}/samples/a?digest=false`)).json.weights, { digest: null, state: 'current' })
  t.equal(reads, 0)
  const replies = await Promise.all(['a', 'b', 'a'].map(async id => (await call(`${url}/samples/${id}`)).json.weights))
  t.equal(reads, 1)
  t.equal(new Set(replies.map(({ digest }) => digest)).size, 1)
  engine.epoch++
  await call(`${url}/generate`, { input_ids: [5], rid: 'c', ...LOGPROBS })
  engine.epoch++
  t.match((await call(`${url}/samples/a`)).json.weights, { ...replies[0], state: 'gone' }, 'the digest is remembered')
  t.match((await call(`${url}/samples/c`)).json.weights, { digest: null, state: 'gone' }, 'nobody asked in time')
  t.equal(reads, 1)
})

t.test('weights that are written while a request runs make its receipt mixed', async t => {
  const engine = new FakeEngine({ stepMs: 5 })
  const { url } = await routeApp(t, { engine })
  const running = call(`${url}/generate`, {
    input_ids: [5],
    rid: 'a',
    sampling_params: { max_new_tokens: 20 },
    ...LOGPROBS
  })
  while (engine.stats.running === 0) await new Promise(resolve => setTimeout(resolve, 1))
  engine.epoch++
  engine.weightVersion = 'next'
  await running
  const { json } = await call(`${url}/samples/a`)
  t.same(json.weights, { digest: null, state: 'mixed' })
  t.equal(json.weight_versions.at(-1).version, 'next')
})

t.test('what /generate cannot repeat is named', async t => {
  const { url } = await routeApp(t)
  await call(`${url}/v1/completions`, {
    prompt: [5],
    model: 'fake',
    rid: 'a',
    max_tokens: 2,
    allowed_token_ids: [5, 6],
    receipt: true
  })
  t.same((await call(`${url}/samples/a`)).json.unrepeatable, ['allowed_token_ids'])
})

t.test('differences are counted with their mean, largest, 99th percentile, KL and clipped part', async t => {
  const tally = new DifferenceTally()
  t.same(tally.values, { tokens: 0, mean: 0, max: 0, p99: 0, kl: 0, clipped: 0 })
  const values = Array.from({ length: 1000 }, (_, i) => (i % 2 === 0 ? 1 : -1) * (i + 1) / 1000)
  for (const value of values) tally.add(value)
  const { tokens, mean, max, p99, kl, clipped } = tally.values
  const average = (of: (value: number) => number): number => values.reduce((sum, value) => sum + of(value), 0) / 1000
  t.same([tokens, max], [1000, 1])
  t.ok(Math.abs(mean - average(Math.abs)) < 1e-12)
  t.ok(p99 >= 0.99 && p99 <= 0.99 * 1.13, `${p99}`)
  t.ok(Math.abs(kl - average(d => Math.exp(d) - 1 - d)) < 1e-9)
  t.equal(clipped, values.filter(value => value > Math.log(2)).length / 1000)
  for (const value of [0, 1e-12, 1e6, -1e6]) tally.add(value)
  t.ok(Number.isFinite(tally.values.kl) && tally.values.max === 1e6)
})
