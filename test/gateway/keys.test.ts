import Fastify from 'fastify'
import type { FastifyRequest } from 'fastify'
import t from 'tap'
import type { Test } from 'tap'
import { join } from 'node:path'
import { until } from '../helpers/route-app.ts'
import { engineServer, gatewayTo, modelFolder } from '../helpers/gateway.ts'

/** An address that anybody may name as an engine. It keeps all that it is sent, and replies as a refit engine does. */
async function stranger (t: Test): Promise<{ url: string, got: () => string }> {
  const app = Fastify({ forceCloseConnections: true })
  let got = ''
  const keep = (request: FastifyRequest): void => {
    got += JSON.stringify([request.url, request.headers, request.body])
  }
  app.get('/capabilities', async request => {
    keep(request)
    return { server: 'refit' }
  })
  app.get('/server_info', async request => {
    keep(request)
    return { tp_size: 1, weight_version: 'other', started_at: 1, weights: 'current', model_path: '/m' }
  })
  // So that the weights have to come from a peer.
  app.post('/update_weights_from_disk', async (request, reply) => {
    keep(request)
    return await reply.code(400).send({ success: false, message: 'no disk' })
  })
  app.all('/*', async request => {
    keep(request)
    return { success: true, checksums: {}, per_engine_checksum: 'same' }
  })
  t.teardown(async () => await app.close())
  return { url: await app.listen({ host: '127.0.0.1', port: 0 }), got: () => got }
}

t.test('a gateway with keys of engines and none of its own takes no engine from clients', async t => {
  const folder = modelFolder(t)
  const engine = await engineServer(t, folder, { apiKey: 'engine-key', adminApiKey: 'engine-admin' })
  const { url, got } = await stranger(t)
  const gateway = await gatewayTo(t, [engine.url], {
    engineKeys: { apiKey: 'engine-key', adminApiKey: 'engine-admin' }
  })
  for (const body of [{ url }, { url, api_key: 'own' }]) {
    const { status, body: refusal } = await gateway.post('/workers', body)
    t.equal(status, 403)
    t.match(refusal, { error: { code: 'WORKERS_CLOSED', message: /--admin-api-key/ } })
  }
  t.same(gateway.states(), { [engine.url]: 'ready' })
  t.equal(got(), '', 'nothing was sent there')
})

t.test('an engine that was added without a key gets no key of clients and of other engines', async t => {
  const folder = modelFolder(t)
  const keyed = await engineServer(t, folder, { adminApiKey: 'peer-admin' })
  const { url, got } = await stranger(t)
  const gateway = await gatewayTo(t, [])
  t.equal((await gateway.post('/workers', { url: keyed.url, admin_api_key: 'peer-admin' })).status, 202)
  await gateway.until(keyed.url, 'ready')
  t.equal((await gateway.post('/workers', { url, api_key: 'own-key' })).status, 202)
  await gateway.until(url, 'stale')
  await until(() => gateway.app.gateway.fleet.list.some(({ reason }) => /it gets no key of/.test(reason ?? '')))
  const keys = { authorization: 'Bearer client-key', cookie: 'client-key', 'x-nemo-rl-refit-key': 'client-key' }
  await gateway.post('/nemo-rl/refit/prepare', {}, keys)
  await gateway.post('/update_weights_from_disk', { model_path: join(folder, 'adder'), weight_version: 'step-3' }, keys)
  await gateway.post('/generate', { text: '1+1=' }, keys)
  t.match(got(), /step-3/, 'it gets the calls')
  t.match(got(), /Bearer own-key/, 'and its own key')
  t.notMatch(got(), /client-key/)
  t.notMatch(got(), /peer-admin/)
})

t.test('an engine that was added with the admin key gets the keys of the gateway', async t => {
  const folder = modelFolder(t)
  const engine = await engineServer(t, folder, { apiKey: 'engine-key' })
  const gateway = await gatewayTo(t, [], { adminApiKey: 'admin', engineKeys: { apiKey: 'engine-key' } })
  t.equal((await gateway.post('/workers', { url: engine.url })).status, 401)
  t.equal((await gateway.post('/workers', { url: engine.url }, { authorization: 'Bearer admin' })).status, 202)
  await gateway.until(engine.url, 'ready')
})

t.test('a gateway that is named as its own engine, or through another one, finds the loop', async t => {
  const folder = modelFolder(t)
  const engine = await engineServer(t, folder)
  const first = await gatewayTo(t, [engine.url])
  const second = await gatewayTo(t, [first.url])
  for (const url of [first.url, second.url]) {
    t.equal((await first.post('/workers', { url })).status, 202)
    await first.until(url, 'down')
    const { errors } = (await first.get('/health')).body
    t.match(errors.find((error: { url: string }) => error.url === url).message, url === first.url ? /leads back/ : /./)
  }
  t.equal(first.app.gateway.fleet.ready.length, 1, 'only the engine')
  t.equal((await first.post('/generate', { text: '1+1=', sampling_params: { max_new_tokens: 1 } })).status, 200)
  t.equal((await fetch(`${first.url}/model_info`, { headers: { via: '1.1 proxy' } })).status, 200, 'another proxy')
})
