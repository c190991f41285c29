import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import type { EngineRequest } from '../../src/remote/connection.ts'
import { packageRoot } from '../../src/root.ts'
import { ask, engineServer, gatewayTo, modelFolder } from '../helpers/gateway.ts'
import type { EngineServer, GatewayUnderTest } from '../helpers/gateway.ts'
import { slowSteps } from '../helpers/slow-steps.ts'
import { until } from '../helpers/transaction-server.ts'

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')

// Updates with finish_old of several engines, one of which is not reached, refuses, or misses a part.

const DISK = '/update_weights_from_disk'
const LONG = { max_new_tokens: 2000, ignore_eos: true }

const sums = async ({ engine }: EngineServer): Promise<unknown> => (await engine.checksums()).tensors

/** Three engines behind a gateway, each with a request that runs until it is aborted. */
async function three (t: Test, last: { shadowWeights: boolean }, fill: boolean) {
  const folder = modelFolder(t)
  const engines = [
    await engineServer(t, folder, { shadowWeights: true }),
    await engineServer(t, folder, { shadowWeights: true }),
    await engineServer(t, folder, last)
  ] as const
  const gateway = await gatewayTo(t, engines.map(({ url }) => url), { fill })
  slowSteps(t, 3, 20)
  const start = async (rid: string) =>
    await Promise.all(engines.map(async ({ url, engine }) => {
      const running = post(url, '/generate', ask('12+34=', { rid }, LONG))
      await until(() => engine.stats.running > 0)
      return { running, url }
    }))
  return { folder, engines, gateway, start }
}

async function post (url: string, path: string, body: object): Promise<any> {
  const reply = await fetch(url + path, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify(body)
  })
  const text = await reply.text()
  return text === '' ? null : JSON.parse(text)
}

/** Updates from disk do not reach the engine until the returned function is called. Health checks do. */
function cutOff ({ app }: GatewayUnderTest, { url }: EngineServer): () => void {
  const worker = app.gateway.fleet.list.find(worker => worker.url === url)!
  const { connection } = worker
  worker.connection = new Proxy(connection, {
    get: (target, name) =>
      name !== 'request'
        ? Reflect.get(target, name)
        : async (request: EngineRequest) => {
          if (request.path === DISK) throw new Error('no route to host')
          return await target.request(request)
        }
  })
  return () => {
    worker.connection = connection
  }
}

t.test('an engine that was not reached keeps its weights, the others old requests; a retry reaches all', async t => {
  const { folder, engines, gateway, start } = await three(t, { shadowWeights: true }, false)
  const [a, b, c] = engines
  const before = await sums(c)
  const running = await start('old')
  const reached = cutOff(gateway, c)
  const body = { model_path: join(folder, 'adder'), weight_version: 'v1', swap: 'demand', on_running: 'finish_old' }
  const reply = await gateway.post(DISK, body)
  t.match(reply, {
    status: 502,
    body: {
      success: false,
      message: new RegExp(`^1 of 3 engines failed: ${c.url}: no route to host`),
      engines: { [a.url]: { success: true }, [b.url]: { success: true }, [c.url]: { success: false } }
    }
  })
  for (const { engine } of [a, b]) {
    t.match(engine, { weightVersion: 'v1', weights: { state: 'current' } })
    t.match(engine.weightSets, { oldRequests: 1, shadow: { state: 'old' } })
  }
  t.match(c.engine, { weightVersion: 'default', weights: { state: 'current' }, stats: { running: 1, onOldWeights: 0 } })
  t.match(c.engine.weightSets, { oldRequests: 0, shadow: { state: 'idle' } })
  t.same(await sums(c), before)
  t.not(gateway.states()[c.url], 'ready')
  for (let i = 0; i < 6; i++) {
    const { body: { meta_info: meta } } = await gateway.post('/generate', ask('1+2='), { 'x-session-id': String(i) })
    t.equal(meta.weight_version, 'v1')
  }
  reached()
  await gateway.until(c.url, 'stale')
  // The retry waits for the requests on old weights of the engines that have the update already.
  const retry = gateway.post(DISK, body)
  await until(() => c.engine.weightSets!.shadow.state === 'old')
  t.match(c.engine, { weightVersion: 'v1', weightSets: { oldRequests: 1 } })
  for (const { url } of [a, b]) await post(url, '/abort_request', { rid: 'old' })
  t.match(await retry, { status: 200, body: { success: true } })
  await post(c.url, '/abort_request', { rid: 'old' })
  for (const { running: one } of running) {
    t.match((await one).meta_info, { weight_version: 'default', finish_reason: { type: 'abort' } })
  }
  await gateway.until(c.url, 'ready')
  for (const one of [b, c]) t.same(await sums(one), await sums(a))
  for (const { engine } of engines) await until(() => engine.weightSets!.shadow.state === 'idle')
  t.match(await gateway.post(DISK, { ...body, weight_version: 'v2' }), { status: 200 })
})

t.test('an engine with one set refuses, is named, and then loads the weights of the others', async t => {
  const { folder, engines, gateway, start } = await three(t, { shadowWeights: false }, true)
  const [a, b, c] = engines
  const running = await start('old')
  const reply = await gateway.post(DISK, {
    model_path: join(folder, 'adder'),
    weight_version: 'v1',
    on_running: 'finish_old'
  })
  t.match(reply, {
    status: 502,
    body: {
      message: new RegExp(`^1 of 3 engines failed: ${c.url}: 409 .*one set of weights`),
      engines: { [c.url]: { status: 409, error: { code: 'CONFLICT' } } }
    }
  })
  await gateway.until(c.url, 'ready')
  t.equal(c.engine.weightVersion, 'v1')
  for (const one of [b, c]) t.same(await sums(one), await sums(a))
  for (const { engine } of [a, b]) t.match(engine.weightSets, { oldRequests: 1, shadow: { state: 'old' } })
  for (const { url } of engines) await post(url, '/abort_request', { rid: 'old' })
  for (const { running: one } of running) t.match((await one).meta_info, { finish_reason: { type: 'abort' } })
})

for (const expected of ['all', undefined] as const) {
  t.test(`an engine that missed a part of a transaction with ${expected ?? 'no'} names gets the whole`, async t => {
    const { folder, engines, gateway, start } = await three(t, { shadowWeights: true }, true)
    const [a, b, c] = engines
    const running = await start('old')
    for (const [turn, model] of ['adder', 'adder-base'].entries()) {
      const opened = await gateway.post('/weight_transactions', {
        owner: 'trainer',
        weight_version: `v${turn}`,
        on_running: 'finish_old',
        ...expected === undefined ? {} : { expected }
      })
      t.equal(opened.status, 200, JSON.stringify(opened.body))
      const { id } = opened.body
      const reached = cutOff(gateway, c)
      t.match(await gateway.post(DISK, { model_path: join(folder, model), transaction: id }), {
        status: 502,
        body: { message: /1 of 3 engines failed.*no route to host/ }
      })
      for (const { engine } of engines) t.not(engine.weightVersion, `v${turn}`)
      reached()
      await gateway.until(c.url, 'stale')
      const commit = await gateway.post(`/weight_transactions/${String(id)}/commit`)
      t.equal(commit.status, 200, JSON.stringify(commit.body))
      for (const { engine } of [a, b]) {
        t.equal(engine.weightVersion, `v${turn}`)
        t.match(engine.weights, { state: 'current' })
        t.match(engine.weightSets, { oldRequests: turn === 0 ? 1 : 0 })
      }
      await gateway.until(c.url, 'ready')
      t.equal(c.engine.weightVersion, `v${turn}`)
      for (const one of [b, c]) t.same(await sums(one), await sums(a), `turn ${turn}`)
      for (const { engine } of engines) t.equal(engine.transactions.currentId, null)
      for (const { url, engine } of engines) {
        await post(url, '/abort_request', { abort_all: true })
        await until(() => engine.weightSets!.shadow.state === 'idle')
      }
    }
    for (const { running: one } of running) t.match((await one).meta_info, { finish_reason: { type: 'abort' } })
  })
}

t.test('an engine that refused a part of a scope, and its end, is not left with an open scope', async t => {
  const [folder, elsewhere] = [modelFolder(t), modelFolder(t)]
  const engines = [await engineServer(t, folder), await engineServer(t, elsewhere)] as const
  const [a, c] = engines
  const gateway = await gatewayTo(t, engines.map(({ url }) => url))
  for (const [begin, end] of [['begin', 'end'], ['start', 'finish']] as const) {
    t.equal((await gateway.post(`/${begin}_weight_update`)).status, 200)
    const model = begin === 'begin' ? 'adder' : 'adder-base'
    const part = await gateway.post(DISK, { model_path: join(folder, model), weight_version: begin })
    t.match(part, { status: 502, body: { message: new RegExp(`1 of 2 engines failed: ${c.url}`) } })
    t.equal((await gateway.post(`/${end}_weight_update`)).status, 200)
    await gateway.until(c.url, 'ready')
    for (const { engine } of engines) t.match(engine, { weightVersion: begin, transactions: { currentId: null } })
    t.same(await sums(c), await sums(a))
  }
})
