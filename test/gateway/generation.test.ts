import t from 'tap'
import type { Test } from 'tap'
import { ask, engineServer, gatewayTo, modelFolder } from '../helpers/gateway.ts'
import type { EngineServer, GatewayUnderTest } from '../helpers/gateway.ts'

const prompts = Array.from({ length: 24 }, (_, i) => `${100 + i * 7}+${i}=`)

async function fleet (t: Test, count: number): Promise<{ engines: EngineServer[], gateway: GatewayUnderTest }> {
  const folder = modelFolder(t)
  const engines = await Promise.all(Array.from({ length: count }, async () => await engineServer(t, folder)))
  return { engines, gateway: await gatewayTo(t, engines.map(({ url }) => url)) }
}

t.test('prompts spread over the engines, while equal prompts and sessions stay on one engine', async t => {
  const { engines, gateway } = await fleet(t, 3)
  const served = (): number[] => engines.map(({ engine }) => engine.stats.promptTokens)
  const whoServes = async (body: object, headers = {}): Promise<number> => {
    const before = served()
    t.equal((await gateway.post('/generate', body, headers)).status, 200)
    // Counts come from the scheduler's thread.
    for (;;) {
      const who = served().findIndex((count, i) => count > before[i]!)
      if (who >= 0) return who
      await new Promise(resolve => setTimeout(resolve, 2))
    }
  }
  const homes: number[] = []
  for (const text of prompts) homes.push(await whoServes(ask(text)))
  for (let i = 0; i < 3; i++) {
    t.ok(
      homes.filter(home => home === i).length > 0,
      `engine ${i} serves ${
        homes
          .filter(home => home === i)
          .length
      } of 24`
    )
  }
  for (const [i, text] of prompts.slice(0, 6).entries()) t.equal(await whoServes(ask(text)), homes[i])
  const sessions = new Set<number>()
  for (const name of ['X-Session-ID', 'x-smg-routing-key']) {
    const first = await whoServes(ask(prompts[0]!), { [name]: 'talk' })
    for (const text of prompts.slice(1, 4)) t.equal(await whoServes(ask(text), { [name]: 'talk' }), first)
    for (let i = 0; i < 9; i++) sessions.add(await whoServes(ask(prompts[0]!), { [name]: `talk ${i}` }))
  }
  t.ok(sessions.size > 1)
})

t.test('many samples of one prompt at once spread over the engines', async t => {
  const { engines, gateway } = await fleet(t, 2)
  const most = [0, 0]
  const timer = setInterval(() => {
    for (const [i, worker] of gateway.app.gateway.fleet.list.entries()) most[i] = Math.max(most[i]!, worker.load)
  }, 1)
  const all = await Promise.all(
    Array.from({ length: 32 }, async () =>
      await gateway
        .post('/generate', ask('1+1=', {}, { max_new_tokens: 60, ignore_eos: true })))
  )
  clearInterval(timer)
  t.ok(all.every(({ status }) => status === 200))
  for (const { engine } of engines) t.ok(engine.stats.generationTokens > 0)
  t.ok(Math.max(...most) <= 20, `at most ${Math.max(...most)} of 32 on one`)
})

t.test('a stream is passed on chunk by chunk, and ends on the engine when the client disconnects', async t => {
  const { engines, gateway } = await fleet(t, 1)
  const { engine } = engines[0]!
  const long = (fields: object, signal: AbortSignal): Promise<Response> =>
    fetch(`${gateway.url}/generate`, {
      method: 'POST',
      signal,
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify(ask('1+1=', fields, { max_new_tokens: 100, ignore_eos: true }))
    })
  // A paused engine generates nothing, but it sends the headers.
  await engine.pause('in_place')
  const [leave, leaveEarly] = [new AbortController(), new AbortController()]
  const reply = await long({ stream: true }, leave.signal)
  t.match(reply.headers.get('content-type'), /event-stream/)
  const waiting = long({}, leaveEarly.signal).catch(() => 'left')
  await settled(() => engine.stats.running + engine.stats.queued === 2)
  leave.abort()
  await settled(() => engine.stats.running + engine.stats.queued === 1)
  leaveEarly.abort()
  t.equal(await waiting, 'left')
  await settled(() => engine.stats.running + engine.stats.queued === 0)
  t.same(gateway.states(), { [engines[0]!.url]: 'ready' }, 'a client that disconnects is no failure of the engine')
  await engine.resume()
  t.equal(engine.stats.generationTokens, 0)
  const whole = await (await fetch(`${gateway.url}/v1/chat/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ messages: [{ role: 'user', content: 'What is 1+1?' }], stream: true, max_tokens: 4 })
  }))
    .text()
  t.match(whole, /^data: \{[^]*data: \[DONE\]\n\n$/)
})

t.test('refusals of engines are passed on unchanged, and an abort by id reaches the engine', async t => {
  const { engines, gateway } = await fleet(t, 2)
  const refused = await gateway.post('/generate', { text: 'x', sampling_params: { temperature: -1 } })
  t.equal(refused.status, 400)
  t.match(refused.body.error, { code: 'INVALID_REQUEST' })
  for (const { engine } of engines) await engine.pause('in_place')
  const running = gateway.post('/generate', ask('1+1=', { rid: 'mine' }))
  await settled(() => engines.some(({ engine }) => engine.stats.running + engine.stats.queued === 1))
  t.equal((await gateway.post('/abort_request', { rid: 'mine' })).status, 200)
  t.match((await running).body.meta_info.finish_reason, { type: 'abort' })
  t.equal((await gateway.get('/v1/loads')).body.loads.length, 2)
  t.equal((await gateway.get('/v1/models')).status, 200)
})

async function settled (condition: () => boolean): Promise<void> {
  const end = performance.now() + 60_000
  while (!condition()) {
    if (performance.now() > end) throw new Error('the condition did not become true')
    await new Promise(resolve => setTimeout(resolve, 5))
  }
}
