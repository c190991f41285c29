import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { ask, engineServer, gatewayTo, modelFolder } from '../helpers/gateway.ts'
import type { EngineServer, GatewayUnderTest } from '../helpers/gateway.ts'

// A trainer updates the engines at their own addresses while requests come through the gateway.

/** The checks at intervals come too late to count: what settles the fleet is what the gateway hears and looks at. */
const RARELY_MS = 60_000

async function post (url: string, body: object = {}): Promise<any> {
  const reply = await fetch(url, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify(body)
  })
  if (reply.status !== 200) throw new Error(`${url} answered ${reply.status}: ${await reply.text()}`)
  return await reply.json()
}

async function sleep (ms: number): Promise<void> {
  await new Promise(resolve => setTimeout(resolve, ms))
}

interface Answer {
  status: number
  text: string
  version: string
  sentAt: number
}

/** Sends requests one after another from several clients until `stop`. */
function clients (gateway: GatewayUnderTest, count = 3): { answers: Answer[], stop: () => Promise<void> } {
  const answers: Answer[] = []
  const over = new AbortController()
  const all = Promise.all(Array.from({ length: count }, async (_, i) => {
    while (!over.signal.aborted) {
      const sentAt = performance.now()
      const { status, body } = await gateway.post('/generate', ask('12+34='), { 'x-session-id': `client ${i}` })
      answers.push({ status, text: body.text, version: body.meta_info?.weight_version ?? body.message, sentAt })
    }
  }))
  return {
    answers,
    stop: async () => {
      over.abort()
      await all
    }
  }
}

/** Waits until requests go to all engines; returns how long that took. */
async function settled ({ app }: GatewayUnderTest, engines: readonly EngineServer[]): Promise<number> {
  const began = performance.now()
  while (app.gateway.fleet.generating.length < engines.length) {
    if (performance.now() > began + RARELY_MS / 2) throw new Error('the fleet has not settled')
    await sleep(5)
  }
  return performance.now() - began
}

function checkAnswers (t: Test, answers: readonly Answer[], updatedAt: number, version: string): void {
  t.same(answers.filter(({ status }) => status !== 200), [], 'no request fails')
  const after = answers.filter(({ sentAt }) => sentAt > updatedAt)
  t.ok(after.length > 0)
  t.same(after.filter(answer => answer.version !== version || answer.text !== '46'), [], 'no reply has stale weights')
}

for (const count of [1, 2]) {
  t.test(`requests wait while ${count} released engines are updated directly`, async t => {
    const folder = modelFolder(t)
    const engines: EngineServer[] = []
    for (let i = 0; i < count; i++) engines.push(await engineServer(t, folder))
    const gateway = await gatewayTo(t, engines.map(({ url }) => url), { healthMs: RARELY_MS, waitMs: 60_000 })
    const traffic = clients(gateway)
    for (const [round, awakeMs] of [0, 700].entries()) {
      await sleep(100)
      for (const { url } of engines) await post(`${url}/release_memory_occupation`)
      await sleep(300)
      for (const { url } of engines) await post(`${url}/resume_memory_occupation`)
      // Torn until the update: the gateway sees them so and holds requests back.
      await sleep(awakeMs)
      const version = `step-${round + 1}`
      for (const { url } of engines) {
        await post(`${url}/update_weights_from_disk`, {
          model_path: join(folder, 'adder'),
          weight_version: version
        })
      }
      const updatedAt = performance.now()
      const ms = await settled(gateway, engines)
      t.comment(`settled ${Math.round(ms)} ms after the update`)
      const { answers } = traffic
      while (!answers.some(({ sentAt }) => sentAt > updatedAt)) await sleep(5)
      checkAnswers(t, answers, updatedAt, version)
    }
    await traffic.stop()
    t.same(traffic.answers.filter(({ status }) => status !== 200), [])
  })
}

t.test("the gateway hears of a direct update from a reply, and compares an engine's weights soon", async t => {
  const folder = modelFolder(t)
  const [a, b] = [await engineServer(t, folder), await engineServer(t, folder)]
  const gateway = await gatewayTo(t, [a.url, b.url], { healthMs: RARELY_MS })
  const { fleet } = gateway.app.gateway
  for (const version of ['step-1', 'step-2']) {
    for (const { url } of [a, b]) {
      await post(`${url}/update_weights_from_disk`, { model_path: join(folder, 'adder'), weight_version: version })
    }
    for (let i = 0; i < 8; i++) await gateway.post('/generate', ask('12+34='), { 'x-session-id': String(i) })
    for (let waited = 0; fleet.version !== version && waited < 5000; waited += 10) await sleep(10)
    t.equal(fleet.version, version)
    await settled(gateway, [a, b])
  }
})

t.test('an engine whose weights are torn gets no checkpoint from before a direct update', async t => {
  const folder = modelFolder(t)
  const engine = await engineServer(t, folder)
  const gateway = await gatewayTo(t, [engine.url], { healthMs: 60 })
  const update = { model_path: join(folder, 'adder-base'), weight_version: 'old' }
  t.equal((await gateway.post('/update_weights_from_disk', update)).status, 200)
  await post(`${engine.url}/update_weights_from_disk`, { model_path: join(folder, 'adder'), weight_version: 'new' })
  const { fleet } = gateway.app.gateway
  for (let waited = 0; fleet.version !== 'new' && waited < 5000; waited += 10) await sleep(10)
  t.equal(fleet.version, 'new')
  await post(`${engine.url}/release_memory_occupation`)
  await post(`${engine.url}/resume_memory_occupation`)
  await gateway.until(engine.url, 'stale')
  await sleep(300)
  t.equal(engine.engine.weights.state, 'torn', 'the old checkpoint was not loaded')
  t.equal(engine.engine.weightVersion, 'new')
})

t.test('a request waits for at most --engine-wait, and a client that leaves waits no longer', async t => {
  const folder = modelFolder(t)
  const engine = await engineServer(t, folder)
  const gateway = await gatewayTo(t, [engine.url], { waitMs: 200 })
  await post(`${engine.url}/release_memory_occupation`)
  const began = performance.now()
  const { status, body } = await gateway.post('/generate', ask('12+34='))
  t.equal(status, 503)
  t.match(body.message, /asleep: its memory is released/)
  t.ok(performance.now() - began >= 200)
  t.equal(gateway.app.gateway.fleet.list[0]!.load, 0)
})
