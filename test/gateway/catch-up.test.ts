import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { eventually } from '../helpers/eventually.ts'
import { joined } from '../helpers/load-from.ts'
import { ask, engineServer, gatewayTo, modelFolder } from '../helpers/gateway.ts'
import type { EngineServer, GatewayUnderTest, Reply } from '../helpers/gateway.ts'
import { recorder } from '../helpers/recorder.ts'

/** Uploads weights, so the gateway knows no checkpoint that holds them. */
async function upload ({ url }: GatewayUnderTest, folder: string, version: string, model = 'adder'): Promise<number> {
  const sent = await fetch(`${url}/update_weights_from_tensor?weight_version=${version}`, {
    method: 'POST',
    headers: { 'content-type': 'application/octet-stream' },
    body: readFileSync(join(folder, model, 'model.safetensors'))
  })
  return sent.status
}

const sums = async ({ engine }: EngineServer): Promise<unknown> => (await engine.checksums()).tensors
const reasonOf = ({ app }: GatewayUnderTest, engine: string): string =>
  app.gateway.fleet.list.find(({ url }) => url === engine)?.reason ?? ''

async function until (condition: () => boolean): Promise<void> {
  const end = performance.now() + 60_000
  while (!condition()) {
    if (performance.now() > end) throw new Error('the condition did not become true')
    await new Promise(resolve => setTimeout(resolve, 5))
  }
}

t.test('an engine that joins or returns after an upload loads the weights from a peer', async t => {
  const folder = modelFolder(t)
  const first = await engineServer(t, folder)
  const dies = await engineServer(t, folder)
  const gateway = await gatewayTo(t, [first.url, dies.url])
  t.equal(await upload(gateway, folder, 'step-7'), 200)
  const late = await engineServer(t, folder, { tp: 2 })
  t.equal((await gateway.post('/workers', { url: late.url })).status, 202)
  await gateway.until(late.url, 'ready')
  t.equal(late.engine.weightVersion, 'step-7')
  t.same(await sums(late), await sums(first))
  await dies.kill()
  await gateway.until(dies.url, 'down')
  const back = await engineServer(t, folder, { port: dies.port })
  t.equal(back.engine.weightVersion, 'default')
  await gateway.until(back.url, 'ready')
  t.equal(back.engine.weightVersion, 'step-7')
  t.same(await sums(back), await sums(first))
  const metrics = (await gateway.get('/metrics')).body as string
  t.match(metrics, /refit:gateway_fills_total\{from="peer",outcome="success"\} 2\n/)
  t.match(metrics, /refit:gateway_fill_seconds_count 2\n/)
})

t.test('the checkpoint of the last update is tried first, then a peer that holds the weights', async t => {
  const [folder, elsewhere] = [modelFolder(t), modelFolder(t)]
  const first = await engineServer(t, folder)
  const gateway = await gatewayTo(t, [first.url])
  await gateway.post('/update_weights_from_disk', { model_path: join(folder, 'adder'), weight_version: 'step-8' })
  // This engine may only load from its own folder.
  const late = await engineServer(t, elsewhere)
  await gateway.post('/workers', { url: late.url })
  await gateway.until(late.url, 'ready')
  t.same(await sums(late), await sums(first))
  const metrics = (await gateway.get('/metrics')).body as string
  t.match(metrics, /refit:gateway_fills_total\{from="disk",outcome="failed"\} 1\n/)
  t.match(metrics, /refit:gateway_fills_total\{from="peer",outcome="success"\} 1\n/)
})

/** An engine that joins and waits for a peer that cannot send until `held` is aborted. */
async function heldBack (t: Test, options?: Parameters<typeof gatewayTo>[2]) {
  const folder = modelFolder(t)
  const first = await engineServer(t, folder)
  const gateway = await gatewayTo(t, [first.url], options)
  await upload(gateway, folder, 'step-1')
  return { folder, first, gateway, held: await first.engine.update(), late: await engineServer(t, folder) }
}

t.test('a catch-up has a deadline, reports its failure, is tried again later, and delays no request', async t => {
  const { first, gateway, held, late } = await heldBack(t, { fillTimeoutMs: 1000 })
  await gateway.post('/workers', { url: late.url })
  await until(() => /loads the current weights from/.test(reasonOf(gateway, late.url)))
  for (let i = 0; i < 6; i++) {
    t.equal(
      (await gateway.post('/generate', ask('12+34='), { 'x-session-id': String(i) })).body.meta_info.weight_version,
      'step-1'
    )
  }
  await until(() => /took longer than 1 s/.test(reasonOf(gateway, late.url)))
  await until(() => /tried again in \d+ s/.test(reasonOf(gateway, late.url)))
  const { body } = await eventually(
    async () => await gateway.get('/workers'),
    ({ body }) => /took longer/.test(body.errors[0]?.message)
  )
  t.match(body.errors, [{
    url: late.url,
    state: 'stale',
    message:
      /the current weights came from no checkpoint; the current weights could not be loaded from http.*took longer/
  }])
  await held.abort('the test goes on')
  await gateway.until(late.url, 'ready')
  t.same(await sums(late), await sums(first))
  t.equal(late.engine.weightVersion, 'step-1')
})

t.test('an update aborts a running catch-up, and then returns the engine to rotation itself', async t => {
  const { folder, first, gateway, held, late } = await heldBack(t)
  const there = joined(late)
  await gateway.post('/workers', { url: late.url })
  // By now the engine holds its own exclusive section and waits in it for bytes that do not arrive.
  await there
  t.match(reasonOf(gateway, late.url), /loads the current weights from/)
  const update = gateway.post('/update_weights_from_disk', {
    model_path: join(folder, 'adder-base'),
    weight_version: 'step-2'
  })
  // The engine that joins has the update before its peer, so it did not wait for the peer's bytes.
  await until(() => late.engine.weightVersion === 'step-2')
  t.equal(first.engine.weightVersion, 'step-1')
  await held.abort('the test goes on')
  t.equal((await update).status, 200)
  await gateway.until(late.url, 'ready')
  t.same(await sums(late), await sums(first))
  t.equal(first.engine.weightVersion, 'step-2')
})

t.test('a call that releases memory does not wait for a catch-up', async t => {
  const { gateway, held, late } = await heldBack(t)
  await gateway.post('/workers', { url: late.url })
  await until(() => /loads the current weights from/.test(reasonOf(gateway, late.url)))
  const { catchingUp } = gateway.app.gateway.fleet.list.find(({ url }) => url === late.url)!
  const released = gateway.post('/release_memory_occupation', { tags: ['kv_cache'] })
  await until(() => catchingUp!.signal.aborted)
  t.match(catchingUp!.signal.reason, { code: 'CONFLICT', message: /came meanwhile/ })
  await held.abort('the test goes on')
  t.equal((await released).status, 200)
})

t.test('with --no-fill an engine with other weights stays out, and nothing is written to it', async t => {
  const folder = modelFolder(t)
  const first = await engineServer(t, folder)
  const gateway = await gatewayTo(t, [first.url], { fill: false })
  await upload(gateway, folder, 'step-1')
  const late = await engineServer(t, folder)
  await gateway.post('/workers', { url: late.url })
  await gateway.until(late.url, 'stale')
  t.match(reasonOf(gateway, late.url), /holds version "default", the others "step-1"/)
  const health: Reply = await gateway.get('/health')
  t.match(health, { status: 200, body: { status: 'degraded', weight_version: 'step-1' } })
  t.equal(late.engine.weightVersion, 'default', 'nothing was written')
})

t.test('SGLang and vLLM engines catch up from disk only, and not at all after a broadcast', async t => {
  const vllm = { '/server_info': {}, '/version': { version: '0.26' } }
  for (
    const [name, replies, update, filled] of [
      ['vllm', vllm, ['/update_weights', { update_info: { path: '/step-1' } }], ['/update_weights', {
        update_info: { path: '/step-1' }
      }]],
      ['sglang', {}, ['/update_weights_from_disk', { model_path: '/step-1' }], ['/update_weights_from_disk', {
        model_path: '/step-1',
        abort_all_requests: true,
        weight_version: 'default'
      }]]
    ] as const
  ) {
    const first = await recorder(t, 1, replies)
    const gateway = await gatewayTo(t, [first.url])
    t.equal(gateway.app.gateway.fleet.list[0]!.facts?.kind, name)
    t.equal((await gateway.post(update[0], update[1])).status, 200)
    const late = await recorder(t, 1, {
      ...replies,
      '/weights_checker': { success: true, per_engine_checksum: 'other' }
    })
    await gateway.post('/workers', { url: late.url })
    await until(() => late.bodies[filled[0]] !== undefined)
    t.same(late.bodies[filled[0]], filled[1])
    // vLLM reports no checksums; SGLang does, and still holds other weights.
    if (name === 'vllm') {
      await gateway.until(late.url, 'ready')
      t.same(late.bodies['/finish_weight_update'], {})
      await gateway.post('/update_weights', { update_info: { names: [] } })
      const last = await recorder(t, 1, replies)
      await gateway.post('/workers', { url: last.url })
      await until(() =>
        /came from no checkpoint; only refit engines load weights from a peer/.test(reasonOf(gateway, last.url))
      )
      t.equal(last.bodies['/update_weights'], undefined)
    } else await until(() => /holds other weights than/.test(reasonOf(gateway, late.url)))
  }
})
