import { Agent, get } from 'node:http'
import { join } from 'node:path'
import t from 'tap'
import { createGateway } from '../../src/app/gateway-server.ts'
import { engineServer, gatewayTo, modelFolder } from '../helpers/gateway.ts'
import { hangs, says, scriptedEngine } from '../helpers/scripted-engine.ts'

t.test('a gateway starts while an engine still catches up', async t => {
  const [a, b] = [
    await scriptedEngine(t),
    await scriptedEngine(t, {
      on: {
        '/weights_checker': says({ success: true, per_engine_checksum: 'other' }),
        '/update_weights_from_disk': hangs
      }
    })
  ]
  let isUp = false
  const starting = createGateway({ engines: [a.url, b.url], healthMs: 60, fillTimeoutMs: 3000 }).then(app => {
    isUp = true
    return app
  })
  while (b.calls['/update_weights_from_disk'] === undefined) await new Promise(resolve => setTimeout(resolve, 5))
  t.ok(isUp)
  await (await starting).close()
})

t.test('an engine that does not reply at the end of a catch-up is checked again', { timeout: 30_000 }, async t => {
  const a = await scriptedEngine(t)
  const b = await scriptedEngine(t, {
    on: { '/weights_checker': says({ success: true, per_engine_checksum: 'other' }) }
  })
  b.on['/update_weights_from_disk'] = () => {
    b.on['/server_info'] = hangs
  }
  const gateway = await gatewayTo(t, [a.url, b.url], { fillTimeoutMs: 300 })
  while (b.on['/server_info'] === undefined) await new Promise(resolve => setTimeout(resolve, 5))
  const seen = b.calls['/server_info']!
  while (b.calls['/server_info'] === seen) await new Promise(resolve => setTimeout(resolve, 5))
  // That call is lost; later calls reach the engine.
  delete b.on['/server_info']
  delete b.on['/weights_checker']
  await gateway.until(b.url, 'ready')
})

t.test(
  'a closed gateway ends after its last reply, even if clients keep connections open',
  { timeout: 10_000 },
  async t => {
    const engine = await scriptedEngine(t)
    let answer = (): void => {}
    engine.on['/generate'] = (request, response) => {
      answer = () => {
        says({ text: 'x' })(request, response)
      }
    }
    const app = await createGateway({ engines: [engine.url], healthMs: 60 })
    const url = await app.listen({ host: '127.0.0.1', port: 0 })
    const agent = new Agent({ keepAlive: true })
    t.teardown(() => {
      agent.destroy()
    })
    const reply = new Promise<number | undefined>((resolve, reject) =>
      get(`${url}/generate`, { agent, method: 'POST' }, response => {
        response.resume().on('end', () => {
          resolve(response.statusCode)
        })
      })
        .on('error', reject)
    )
    while (engine.calls['/generate'] === undefined) await new Promise(resolve => setTimeout(resolve, 5))
    const closed = app.close()
    await new Promise(resolve => setTimeout(resolve, 50))
    answer()
    t.equal(await reply, 200)
    await closed
    t.pass('the connection was not cut')
  }
)

t.test('an engine that is added with its own key gets requests with that key only', async t => {
  const keys = new Set<string | undefined>()
  const on = {
    '/flush_cache': (request: any, response: any) => {
      keys.add(request.headers.authorization)
      says({ success: true })(request, response)
    }
  }
  const [a, b] = [await scriptedEngine(t), await scriptedEngine(t, { on })]
  const engineKeys = { apiKey: 'all', adminApiKey: 'all-admin' }
  const gateway = await gatewayTo(t, [a.url], { engineKeys, adminApiKey: 'admin' })
  const admin = { authorization: 'Bearer admin' }
  t.equal((await gateway.post('/workers', { url: b.url, api_key: 'own' }, admin)).status, 202)
  await gateway.until(b.url, 'ready')
  await gateway.post('/flush_cache', {}, admin)
  t.same([...keys], ['Bearer own'])
})

t.test('an unknown path below a known prefix needs the admin key, too', async t => {
  const engine = await scriptedEngine(t)
  const gateway = await gatewayTo(t, [engine.url], { apiKey: 'key', adminApiKey: 'admin' })
  t.equal((await gateway.post('/v1/models/x', {}, { authorization: 'Bearer key' })).status, 401)
  t.equal(engine.calls['/v1/models/x'], undefined)
})

t.test('a transaction that one engine refuses to begin is open on none', async t => {
  const folder = modelFolder(t)
  const engines = [await engineServer(t, folder), await engineServer(t, folder)]
  const gateway = await gatewayTo(t, engines.map(({ url }) => url))
  for (const path of ['/begin_weight_update', '/start_weight_update']) {
    const strange = await engines[1]!.engine.transactions.open({ owner: 'a stranger' })
    t.match(await gateway.post(path), { status: 502, body: { message: /a stranger/ } })
    await engines[1]!.engine.transactions.abort(strange.id, 'done')
    for (const { engine } of engines) t.equal(engine.transactions.currentId, null, path)
    // Otherwise the update would join the transaction that is open on the first engine, which replies 200 as well.
    t.equal(
      (await gateway.post('/update_weights_from_disk', { model_path: join(folder, 'adder'), weight_version: path }))
        .status,
      200
    )
    for (const { engine } of engines) t.equal(engine.weightVersion, path)
  }
})
