import { join } from 'node:path'
import t from 'tap'
import { ask, engineServer, gatewayTo, modelFolder } from '../helpers/gateway.ts'
import type { GatewayUnderTest } from '../helpers/gateway.ts'

interface Frame {
  event: string
  kind?: string
  state: {
    running: number
    weight_version: string
    engines: { url: string, detail: any, detail_error: string | null }[]
  }
  updates: { engine: string, label_after: string }[]
}

/** The frames of the gateway's event stream, until `last` accepts one. */
async function follow ({ url }: GatewayUnderTest, last: (frame: Frame) => boolean): Promise<Frame[]> {
  const control = new AbortController()
  const reply = await fetch(`${url}/ui/events`, { signal: control.signal })
  const frames: Frame[] = []
  let text = ''
  for await (const chunk of reply.body!.pipeThrough(new TextDecoderStream())) {
    text += chunk
    const parts = text.split('\n\n')
    text = parts.pop()!
    for (const part of parts) {
      const [, event, data] = /^event: (\w+)\ndata: (.*)$/.exec(part)!
      frames.push({ event: event!, ...JSON.parse(data!) })
    }
    if (frames.some(last)) break
  }
  control.abort()
  return frames
}

t.test('the page of a gateway has the state of each engine, and the updates of all', async t => {
  const folder = modelFolder(t)
  const engines = [await engineServer(t, folder, { ui: true }), await engineServer(t, folder, { ui: true })]
  const gateway = await gatewayTo(t, engines.map(({ url }) => url), { ui: true })
  const following = follow(gateway, ({ updates }) => updates.some(update => update.label_after === 'step-2'))
  for (const [model, label] of [['adder', 'step-1'], ['adder-base', 'step-2']] as const) {
    await gateway.post('/update_weights_from_disk', { model_path: join(folder, model), weight_version: label })
  }
  const frames = await following
  t.match(frames[0], { event: 'hello', kind: 'gateway' })
  t.same(frames[0]!.state.engines.map(({ url }) => url), engines.map(({ url }) => url))
  for (const { detail, detail_error: error } of frames[0]!.state.engines) {
    t.equal(error, null)
    t.match(detail, { status: 'ok', kv: { total: 4096 } })
  }
  const updates = frames.flatMap(({ updates }) => updates)
  t.same(new Set(updates.map(({ engine }) => engine)), new Set(engines.map(({ url }) => url)))
})

t.test('a page that opens later has the updates before it', async t => {
  const folder = modelFolder(t)
  const engine = await engineServer(t, folder, { ui: true })
  const gateway = await gatewayTo(t, [engine.url], { ui: true })
  await gateway.post('/update_weights_from_disk', { model_path: join(folder, 'adder'), weight_version: 'step-1' })
  for (let i = 0; i < 2; i++) {
    const [hello] = await follow(gateway, ({ event }) => event === 'hello')
    t.match(hello!.updates, [{ engine: engine.url, label_after: 'step-1' }])
  }
})

t.test('an engine without a page, or with an unknown key, is listed with the reason', async t => {
  const folder = modelFolder(t)
  const without = await engineServer(t, folder)
  const gateway = await gatewayTo(t, [without.url], { ui: true })
  const [hello] = await follow(gateway, ({ event }) => event === 'hello')
  t.match(hello!.state.engines, [{ url: without.url, detail: null, detail_error: /--no-ui/ }])
  t.equal((await gateway.post('/generate', ask('1+1='))).status, 200)
})

t.test('a gateway without the option serves no page, and the state of an engine is no call for it', async t => {
  const engine = await engineServer(t, modelFolder(t), { ui: true })
  const plain = await gatewayTo(t, [engine.url])
  t.not((await plain.get('/ui/events')).status, 200)
  const gateway = await gatewayTo(t, [engine.url], { ui: true, apiKey: 'key' })
  t.equal((await gateway.get('/ui/')).status, 200)
  t.equal((await gateway.get('/ui/events')).status, 401)
  const own = await gatewayTo(t, [engine.url], { ui: true })
  t.match(await own.get('/ui/state'), { status: 400, body: { message: /reads its engines itself/ } })
})
