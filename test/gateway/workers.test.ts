import { once } from 'node:events'
import { createServer, request as httpRequest } from 'node:http'
import type { AddressInfo } from 'node:net'
import { join } from 'node:path'
import t from 'tap'
import { eventually } from '../helpers/eventually.ts'
import { ask, engineServer, gatewayTo, modelFolder } from '../helpers/gateway.ts'

t.test('an engine that joins during training loads the last checkpoint before it gets requests', async t => {
  const folder = modelFolder(t)
  const first = await engineServer(t, folder)
  const gateway = await gatewayTo(t, [first.url])
  t.equal(
    (await gateway.post('/update_weights_from_disk', { model_path: join(folder, 'adder'), weight_version: 'step-7' }))
      .status,
    200
  )
  const late = await engineServer(t, folder)
  const added = await gateway.post('/workers', { url: late.url, worker_type: 'regular' })
  t.equal(added.status, 202)
  t.match(added.body, { url: late.url, id: /^[0-9a-f]{16}$/ })
  t.equal(added.headers.get('location'), `/workers/${added.body.id}`)
  await gateway.until(late.url, 'ready')
  t.equal(late.engine.weightVersion, 'step-7')
  t.same((await late.engine.checksums()).tensors, (await first.engine.checksums()).tensors)
  t.match((await gateway.get('/workers')).body, {
    total: 2,
    weight_version: 'step-7',
    errors: [],
    workers: [{ url: first.url, state: 'ready' }, {
      url: late.url,
      state: 'ready',
      is_healthy: true,
      weight_version: 'step-7'
    }]
  })
  for (const url of [late.url, `${late.url}/`, late.url.replace('http:', 'HTTP:')]) {
    t.equal((await gateway.post('/workers', { url })).status, 202, 'adding it again changes nothing')
  }
  t.equal((await gateway.get('/workers')).body.total, 2)
})

t.test('an engine with the right label and other bytes is found by its checksums', async t => {
  const folder = modelFolder(t)
  const first = await engineServer(t, folder, { model: 'adder', weightVersion: 'step-1' })
  const liar = await engineServer(t, folder, { model: 'adder-base', weightVersion: 'step-1' })
  const gateway = await gatewayTo(t, [first.url, liar.url], { fill: false })
  t.same(gateway.states(), { [first.url]: 'ready', [liar.url]: 'stale' })
  const { body } = await gateway.get('/health')
  t.match(body, {
    status: 'degraded',
    errors: [{ url: liar.url, message: /holds other weights than http.*: (lm_head|model)\..* and \d+ more/ }]
  })
  t.match((await gateway.get(`/workers/${body.errors[0].id}`)).body, {
    state: 'stale',
    is_healthy: false,
    reason: /other weights/
  })
  for (let i = 0; i < 6; i++) {
    t.equal((await gateway.post('/generate', ask('12+34='), { 'x-session-id': String(i) })).body.text, '46')
  }
  // An engine with the same weights enters rotation, even if it missed updates.
  await gateway.post('/update_weights_from_disk', { model_path: join(folder, 'adder'), weight_version: 'step-2' })
  await gateway.until(liar.url, 'ready')
})

t.test('an engine that restarts with old weights loads the current ones before it gets requests', async t => {
  const folder = modelFolder(t)
  const stays = await engineServer(t, folder)
  const dies = await engineServer(t, folder)
  const gateway = await gatewayTo(t, [stays.url, dies.url])
  await gateway.post('/update_weights_from_disk', { model_path: join(folder, 'adder') })
  t.equal(stays.engine.weightVersion, 'default', 'the label is the same')
  await dies.kill()
  await gateway.until(dies.url, 'down')
  const back = await engineServer(t, folder, { port: dies.port })
  await gateway.until(back.url, 'ready')
  t.same((await back.engine.checksums()).tensors, (await stays.engine.checksums()).tensors)
})

t.test('an engine that restarts between two checks, under the same label, is noticed', async t => {
  const folder = modelFolder(t)
  const stays = await engineServer(t, folder)
  const old = await engineServer(t, folder)
  const fresh = await engineServer(t, folder)
  // An address at which another process replies from one moment to the next: no check finds it closed.
  let target = old.url
  const address = createServer((request, response) => {
    const { method, headers } = request
    const call = httpRequest(target + request.url!, { method, headers }, reply => {
      response.writeHead(reply.statusCode!, reply.headers)
      reply.pipe(response)
    })
    call.on('error', () => {
      response.destroy()
    })
    request.pipe(call)
  })
    .listen(0, '127.0.0.1')
  await once(address, 'listening')
  t.teardown(() => {
    address.closeAllConnections()
    address.close()
  })
  const url = `http://127.0.0.1:${(address.address() as AddressInfo).port}`
  const gateway = await gatewayTo(t, [stays.url, url])
  const reply = await gateway.post('/update_weights_from_disk', { model_path: join(folder, 'adder') })
  t.equal(reply.status, 200)
  t.same(Object.values(gateway.states()), ['ready', 'ready'])
  const wanted = (await stays.engine.checksums()).tensors
  t.same((await old.engine.checksums()).tensors, wanted)
  t.equal(fresh.engine.weightVersion, stays.engine.weightVersion, 'the label is the same')
  t.notSame((await fresh.engine.checksums()).tensors, wanted)
  target = fresh.url
  const loaded = await eventually(
    async () => JSON.stringify((await fresh.engine.checksums()).tensors) === JSON.stringify(wanted),
    isEqual => isEqual
  )
  t.ok(loaded, 'the current weights are loaded into the new process')
  await gateway.until(url, 'ready')
})

t.test('a label that another client changes makes engines stale until all engines have it', async t => {
  const folder = modelFolder(t)
  const engines = [await engineServer(t, folder), await engineServer(t, folder), await engineServer(t, folder)]
  const gateway = await gatewayTo(t, engines.map(({ url }) => url))
  const past = async (i: number): Promise<void> => {
    await fetch(`${engines[i]!.url}/update_weights_from_disk`, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify({ model_path: join(folder, 'adder'), weight_version: 'past' })
    })
  }
  await past(0)
  await gateway.until(engines[0]!.url, 'stale')
  t.match((await gateway.get('/health')).body, {
    status: 'degraded',
    weight_version: 'default',
    errors: [{ url: engines[0]!.url, message: /holds version "past", the others "default"/ }]
  })
  await past(1)
  await past(2)
  for (const { url } of engines) await gateway.until(url, 'ready')
  t.equal((await gateway.get('/weight_version')).body.weight_version, 'past')
  for (const { engine } of engines) t.equal(engine.weightVersion, 'past')
})
