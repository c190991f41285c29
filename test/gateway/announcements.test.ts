import t from 'tap'
import { Announcements } from '../../src/gateway/announcements.ts'
import { Worker } from '../../src/gateway/worker.ts'
import type { Test } from 'tap'
import { gatewayTo } from '../helpers/gateway.ts'
import type { GatewayUnderTest } from '../helpers/gateway.ts'
import { recorder } from '../helpers/recorder.ts'

const MANIFEST = '/nemo-rl/refit/s3-manifest'
const FLUSH = '/nemo-rl/refit/flush'
const REFUSED = { success: false, message: 'out for a moment' }

interface Engine {
  url: string
  bodies: Record<string, any>
  replies: Record<string, object>
}

async function engineOf (t: Test): Promise<Engine> {
  const replies: Record<string, object> = {}
  return { ...await recorder(t, 1, replies), replies }
}

async function two (t: Test): Promise<{ a: Engine, b: Engine, gateway: GatewayUnderTest }> {
  const [a, b] = [await engineOf(t), await engineOf(t)]
  return { a, b, gateway: await gatewayTo(t, [a.url, b.url], { fill: false }) }
}

function holdsOther ({ replies }: Engine): void {
  replies['/weights_checker'] = { success: true, per_engine_checksum: 'other' }
}

t.test('an engine that missed an announcement leaves the rotation at the update', async t => {
  const { a, b, gateway } = await two(t)
  t.equal((await gateway.post('/nemo-rl/refit/prepare', { tensors: {} })).status, 200)
  b.replies[MANIFEST] = REFUSED
  t.equal((await gateway.post(MANIFEST, { key: 1 })).status, 502)
  t.equal(gateway.states()[b.url], 'ready', 'no weights have changed yet')
  delete b.replies[MANIFEST]
  t.equal((await gateway.post(MANIFEST, { key: 2 })).status, 200)
  holdsOther(b)
  // The engine replies 200: it wrote everything that it knows of.
  const flushed = await gateway.post(FLUSH)
  t.equal(flushed.status, 200)
  t.same(gateway.states(), { [a.url]: 'ready', [b.url]: 'stale' })
  t.ok(b.bodies[FLUSH], 'it gets the update, which ends its announcements')
  t.notOk(flushed.body.engines, 'its reply does not count')
})

t.test('an engine that joins between announcement and update leaves the rotation at the update', async t => {
  const a = await engineOf(t)
  const gateway = await gatewayTo(t, [a.url], { fill: false })
  await gateway.post('/nemo-rl/refit/prepare', { tensors: {} })
  await gateway.post(MANIFEST, { key: 1 })
  const late = await engineOf(t)
  await gateway.post('/workers', { url: late.url })
  await gateway.until(late.url, 'ready')
  holdsOther(late)
  t.equal((await gateway.post(FLUSH)).status, 200)
  t.same(gateway.states(), { [a.url]: 'ready', [late.url]: 'stale' })
})

t.test('a retried announcement that reaches every engine leaves none stale', async t => {
  const { a, b, gateway } = await two(t)
  const ready = { [a.url]: 'ready', [b.url]: 'ready' }
  await gateway.post('/nemo-rl/refit/prepare', { tensors: {} })
  for (const [i, engine] of [a, b].entries()) {
    engine.replies[MANIFEST] = REFUSED
    await gateway.post(MANIFEST, { key: i })
    delete engine.replies[MANIFEST]
    t.equal((await gateway.post(MANIFEST, { key: i })).status, 200)
  }
  t.equal((await gateway.post(FLUSH)).status, 200)
  t.same(gateway.states(), ready)
  b.replies[MANIFEST] = REFUSED
  await gateway.post(MANIFEST, { key: 3 })
  delete b.replies[MANIFEST]
  await gateway.post('/nemo-rl/refit/prepare', { tensors: {} })
  await gateway.post(MANIFEST, { key: 4 })
  t.equal((await gateway.post(FLUSH)).status, 200)
  t.same(gateway.states(), ready)
})

t.test('an update is refused if no engine has all of its announcements', async t => {
  const { a, b, gateway } = await two(t)
  for (const [i, engine] of [a, b].entries()) {
    engine.replies[MANIFEST] = REFUSED
    await gateway.post(MANIFEST, { key: i })
    delete engine.replies[MANIFEST]
  }
  t.match(await gateway.post(FLUSH), {
    status: 409,
    body: { error: { code: 'CONFLICT', message: /no ready engine has all that the update was announced with/ } }
  })
  for (const { bodies } of [a, b]) t.notOk(bodies[FLUSH])
  t.same(gateway.states(), { [a.url]: 'ready', [b.url]: 'ready' })
})

t.test("AReaL's buckets count as announcements", async t => {
  const { a, b, gateway } = await two(t)
  await gateway.post('/areal_init_weights_update_group', { rank_offset: 1, world_size: 3, group_name: 'g' })
  const meta = '/areal_set_update_weight_meta'
  b.replies[meta] = REFUSED
  t.equal((await gateway.post(meta, { names: ['x'], group_name: 'g' })).status, 502)
  holdsOther(b)
  t.equal((await gateway.post('/areal_update_weights_xccl')).status, 200)
  t.same(gateway.states(), { [a.url]: 'ready', [b.url]: 'stale' })
})

t.test('an engine that restarts has missed what it took before, and what it takes again counts', async t => {
  const [a, b] = [new Worker('http://127.0.0.1:1', {}), new Worker('http://127.0.0.1:2', {})]
  t.teardown(async () => {
    await Promise.all([a.connection.close(), b.connection.close()])
  })
  const announcements = new Announcements()
  announcements.add('kind', true, Buffer.from('one'), [a, b])
  announcements.add('kind', false, Buffer.from('two'), [a, b])
  announcements.add('other', true, Buffer.from('one'), [b])
  t.same(announcements.incomplete('kind', [a, b]), [])
  announcements.forget(a)
  t.same(announcements.incomplete('kind', [a, b]), [a])
  t.same(announcements.incomplete('other', [a, b]), [a])
  announcements.add('kind', false, Buffer.from('one'), [a])
  t.same(announcements.incomplete('kind', [a, b]), [a], 'one of two is not all')
  announcements.add('kind', false, Buffer.from('two'), [a])
  t.same(announcements.incomplete('kind', [a, b]), [])
  announcements.add('kind', false, Buffer.from('three'), [])
  t.same(announcements.incomplete('kind', [a, b]), [], 'what no engine took does not count')
  announcements.end('kind')
  t.same(announcements.incomplete('kind', [a, b, b]), [])
})
