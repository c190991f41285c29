import t from 'tap'
import { boundVersion, stampsOf } from '../../src/http/generation/bound-version.ts'
import type { Sample } from '../../src/http/generation/sample.ts'
import { FakeEngine } from '../helpers/fake-engine.ts'
import { call, routeApp } from '../helpers/route-app.ts'
import { ask, engineServer, gatewayTo, modelFolder } from '../helpers/gateway.ts'

t.test('the stamps of a batch are the oldest and the newest weights of all samples', async t => {
  const sample = (weightVersion: string, ...versions: string[]): Sample =>
    ({ weightVersion, spans: versions.map((version, i) => ({ version, start: i, end: i + 1 })) }) as unknown as Sample
  const batch = [sample('v6', 'v5', 'v6'), sample('v3', 'v3'), sample('v4', 'v4')]
  for (const samples of [batch, [...batch].reverse(), [batch[1]!, batch[0]!, batch[2]!]]) {
    t.same(stampsOf(samples), { weight_version_start: 3, weight_version_end: 6 })
  }
  t.same(stampsOf([sample('step-9')]), { weight_version_start: 9, weight_version_end: 9 }, 'without tokens')
  t.same(stampsOf([sample('default')]), {}, 'no number')
})

t.test('labels are compared by the integer at their end', async t => {
  const suits = (body: Parameters<typeof boundVersion>[0], label: string): boolean => boundVersion(body)!.suits(label)
  const min = { weight_version: { min_version: 7 } }
  for (const label of ['7', 'step-7', 'run/weight_v000007', 'step-10']) t.ok(suits(min, label), label)
  for (const label of ['6', 'run7/weight_v000006', 'default', '8-final', '']) t.notOk(suits(min, label), label)
  t.ok(suits({ min_weight_version: 'step-7' }, 'other-8'))
  const exact = { weight_version: { min_version: 3, exact_version: 7 } }
  t.ok(suits(exact, 'v7'))
  t.notOk(suits(exact, 'v8'), 'the exact version has precedence')
  t.ok(suits({ exact_weight_version: 'run-b' }, 'run-b'))
  t.notOk(suits({ exact_weight_version: 'b-7' }, 'a-7'), 'a text is the whole label')
  t.equal(boundVersion({}), undefined)
  t.equal(boundVersion({ weight_version: null, min_weight_version: null }), undefined)
  t.equal(boundVersion({ weight_version: { min_version: null } }), undefined)
  t.throws(() => boundVersion({ min_weight_version: 'final' }), { code: 'INVALID_REQUEST' })
})

const ids = [5, 6]
const ROUTES = {
  '/generate': { input_ids: ids, sampling_params: { max_new_tokens: 2 } },
  '/v1/completions': { prompt: ids, max_tokens: 2 },
  '/v1/chat/completions': { messages: [{ role: 'user', content: 'a' }], max_tokens: 2 },
  '/inference/v1/generate': { token_ids: ids, sampling_params: { max_tokens: 2 } }
}

for (const [path, body] of Object.entries(ROUTES)) {
  t.test(`${path} waits for the weights that a request is bound to, and stamps its reply`, async t => {
    const { url, engine } = await routeApp(t)
    engine.weightVersion = 'run/weight_v000003'
    let isAnswered = false
    const reply = call(url + path, { ...body, weight_version: { min_version: 4 } }).finally(() => {
      isAnswered = true
    })
    await new Promise(resolve => setTimeout(resolve, 60))
    t.notOk(isAnswered)
    t.same(engine.requests, [], 'the engine has not got it')
    engine.weightVersion = 'run/weight_v000005'
    const { status, json } = await reply
    t.equal(status, 200)
    t.match(json.meta_info ?? json, { weight_version_start: 5, weight_version_end: 5 })
    const plain = (await call(url + path, body)).json
    t.match(plain.meta_info ?? plain, { weight_version_start: 5, weight_version_end: 5 })
    engine.weightVersion = 'default'
    const unnumbered = (await call(url + path, body)).json
    t.notOk('weight_version_start' in (unnumbered.meta_info ?? unnumbered))
  })

  t.test(`${path} refuses a request whose weights do not come`, async t => {
    const { url, engine } = await routeApp(t, { versionWaitMs: 50 })
    engine.weightVersion = 'step-3'
    const late = await call(url + path, { ...body, weight_version: { min_version: 4 } })
    t.match(late.json, { type: 'WeightVersionNotReady', target_version: 4, applied: 'step-3' })
    t.match(late.json.message, /needs weight version 4, .* has "step-3": they did not come within 0.05 s/)
    t.match(late.json.error.code, 'WEIGHT_VERSION')
    t.equal(late.status, 409)
    t.equal(late.headers.get('retry-after'), '1')
    const past = await call(url + path, { ...body, weight_version: { exact_version: 2 } })
    t.match(past.json.message, /it has newer ones/)
    t.equal(past.status, 409)
    t.equal((await call(url + path, { ...body, weight_version: { exact_version: 3 } })).status, 200)
    t.equal((await call(url + path, { ...body, weight_version: { min_version: 'x' } })).status, 400)
    t.equal(engine.requests.length, 1)
  })
}

t.test('a request for exact weights fails if they are replaced while it runs', async t => {
  const engine = new FakeEngine({ stepMs: 10 })
  const { url } = await routeApp(t, { engine })
  engine.weightVersion = 'step-3'
  const body = { input_ids: ids, sampling_params: { max_new_tokens: 30 } }
  const bound = call(`${url}/generate`, { ...body, weight_version: { exact_version: 3 } })
  const free = call(`${url}/generate`, body)
  await new Promise(resolve => setTimeout(resolve, 100))
  engine.weightVersion = 'step-4'
  const { status, json } = await bound
  t.equal(status, 409)
  t.match(json.message, /they were replaced while the request ran/)
  t.match((await free).json.meta_info, { weight_version_start: 3, weight_version_end: 4 })
  t.equal(engine.live, 0)
})

t.test('a client that leaves while its request waits ends it', async t => {
  const { url, engine } = await routeApp(t)
  const gone = new AbortController()
  const left = call(`${url}/generate`, { input_ids: ids, min_weight_version: 9 }, { signal: gone.signal })
  await new Promise(resolve => setTimeout(resolve, 50))
  gone.abort()
  await t.rejects(left)
  await new Promise(resolve => setTimeout(resolve, 50))
  engine.weightVersion = '9'
  await new Promise(resolve => setTimeout(resolve, 50))
  t.same(engine.requests, [])
})

t.test('the gateway prefers engines that have the weights, and passes a refusal on', async t => {
  const folder = modelFolder(t)
  const engines = [
    await engineServer(t, folder, { versionWaitMs: 0 }),
    await engineServer(t, folder, { versionWaitMs: 0 })
  ]
  const gateway = await gatewayTo(t, engines.map(({ url }) => url), { healthMs: 60_000 })
  const [first, second] = gateway.app.gateway.fleet.list
  // A direct update in its middle: only the second engine has the new weights.
  await engines[1]!.engine.setWeightVersion('step-2')
  gateway.app.gateway.health.soon(second!)
  await gateway.until(second!.url, 'stale')
  for (let i = 0; i < 6; i++) {
    const { status, body } = await gateway.post(
      '/generate',
      ask('1+1=', { weight_version: { min_version: 2 } }),
      { 'x-session-id': `talk ${i}` }
    )
    t.equal(status, 200)
    t.equal(body.meta_info.weight_version, 'step-2')
  }
  t.equal(first!.facts!.version, 'default')
  const refused = await gateway.post('/generate', ask('1+1=', { weight_version: { min_version: 3 } }))
  t.match(refused, { status: 409, body: { type: 'WeightVersionNotReady', target_version: 3 } })
})
