import { createServer as createHttpServer } from 'node:http'
import type { AddressInfo } from 'node:net'
import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { createServer } from '../../src/app/server.ts'
import { RemoteEngine } from '../../src/remote/remote-engine.ts'
import { packageRoot } from '../../src/root.ts'
import { loadTokenizer } from '../../src/text/tokenizer.ts'
import { ask, engineServer, modelFolder } from '../helpers/gateway.ts'
import { slowSteps } from '../helpers/slow-steps.ts'
import { until } from '../helpers/transaction-server.ts'

// `on_running` of updates that a server sends on to a remote engine: honoured there, or refused with a reason.

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')

const LONG = { max_new_tokens: 2000, ignore_eos: true }

/** A server in front of a remote engine. */
async function front (t: Test, url: string, folder: string) {
  const remote = await RemoteEngine.connect(url, { pollMs: 50 })
  const app = await createServer({
    engine: remote,
    tokenizer: await loadTokenizer(join(folder, 'adder')),
    modelRoots: [folder],
    closeGraceMs: 200
  })
  const own = await app.listen({ host: '127.0.0.1', port: 0 })
  t.teardown(async () => {
    await app.close()
    await remote.close()
  })
  const call = async (path: string, init: RequestInit): Promise<{ status: number, body: any }> => {
    const reply = await fetch(own + path, { method: 'POST', ...init })
    const text = await reply.text()
    return { status: reply.status, body: text === '' ? null : JSON.parse(text) }
  }
  return {
    post: async (path: string, body: object = {}) =>
      await call(path, { headers: { 'content-type': 'application/json' }, body: JSON.stringify(body) }),
    upload: async (query: string, file: string) =>
      await call(`/update_weights_from_tensor?${query}`, {
        headers: { 'content-type': 'application/octet-stream' },
        body: readFileSync(file)
      })
  }
}

t.test('by path, upload and transaction, two in a row: old requests finish on the weights they began with', async t => {
  const folder = modelFolder(t)
  const { url, engine } = await engineServer(t, folder, { shadowWeights: true })
  const { post, upload } = await front(t, url, folder)
  const sums = { 'adder-base': await engine.checksums() } as Record<string, unknown>
  slowSteps(t, 3, 20)
  const start = (rid: string) => post('/generate', ask('12+34=', { rid }, LONG))
  const ways = {
    path: async (model: string, version: string) =>
      await post('/update_weights_from_disk', {
        model_path: join(folder, model),
        weight_version: version,
        on_running: 'finish_old'
      }),
    upload: async (model: string, version: string) =>
      await upload(`weight_version=${version}&on_running=finish_old`, join(folder, model, 'model.safetensors')),
    transaction: async (model: string, version: string) => {
      const opened = { owner: 'trainer', expected: 'all', weight_version: version, on_running: 'finish_old' }
      const { body: { id } } = await post('/weight_transactions', opened)
      const written = await post('/update_weights_from_disk', { model_path: join(folder, model), transaction: id })
      t.equal(written.status, 200)
      return await post(`/weight_transactions/${String(id)}/commit`)
    }
  }
  let label = 'default'
  let turn = 0
  for (const name of ['path', 'path', 'upload', 'upload', 'transaction', 'transaction'] as const) {
    const rid = `running-${turn}`
    const running = start(rid)
    await until(() => engine.stats.running === 1)
    const model = turn % 2 === 0 ? 'adder' : 'adder-base'
    const reply = await ways[name](model, `${name}-${turn}`)
    t.equal(reply.status, 200, JSON.stringify(reply.body))
    t.match(engine.weightSets, { oldRequests: 1, shadow: { state: 'old' } }, `${name} ${turn}`)
    const next = await post('/generate', ask('1+2='))
    t.match(next.body.meta_info, { weight_version: `${name}-${turn}` })
    sums[model] ??= await engine.checksums()
    t.same(await engine.checksums(), sums[model])
    t.equal((await post('/abort_request', { rid })).status, 200)
    const { body: { meta_info: meta } } = await running
    t.match(meta, { finish_reason: { type: 'abort' }, weight_version: label })
    label = `${name}-${turn++}`
    await until(() => engine.weightSets!.shadow.state === 'idle')
  }
  t.match(engine.setMeter?.counts.updates, { swap: 6, in_place: 0 })
})

t.test('contradictions and engines with one set are refused with a reason, and leave no transaction', async t => {
  const folder = modelFolder(t)
  const two = await engineServer(t, folder, { shadowWeights: true })
  const one = await engineServer(t, folder)
  for (
    const [{ url, engine }, more, status, message] of [
      [two, { swap: 'in_place' }, 400, /leave one of the two out/],
      [two, { abort_all_requests: true }, 400, /leave one of the two out/],
      [one, {}, 409, /one set of weights.*--shadow-weights/],
      [one, { swap: 'in_place' }, 400, /leave one of the two out/]
    ] as const
  ) {
    const { post, upload } = await front(t, url, folder)
    const before = await engine.checksums()
    const fields = { weight_version: 'never', on_running: 'finish_old', ...more }
    const query = new URLSearchParams()
    for (const [name, value] of Object.entries(fields)) query.set(name, String(value))
    for (
      const reply of [
        await post('/update_weights_from_disk', { model_path: join(folder, 'adder'), ...fields }),
        await upload(String(query), join(folder, 'adder', 'model.safetensors'))
      ]
    ) {
      t.equal(reply.status, status, JSON.stringify(reply.body))
      t.match(reply.body.error, { message })
      t.match(reply.body.error, { message: /Nothing has changed/ })
    }
    t.same(await engine.checksums(), before)
    t.match(engine, { weightVersion: 'default', transactions: { currentId: null } })
  }
})

t.test('an update in a scope that ends in another way is refused, and its other parts go on', async t => {
  const folder = modelFolder(t)
  const { url, engine } = await engineServer(t, folder, { shadowWeights: true })
  const { post } = await front(t, url, folder)
  const body = { model_path: join(folder, 'adder') }
  t.equal((await post('/begin_weight_update')).status, 200)
  const refused = await post('/update_weights_from_disk', { ...body, on_running: 'finish_old' })
  t.equal(refused.status, 409, JSON.stringify(refused.body))
  t.match(refused.body.error, { message: /begin_weight_update.*on_running "continue".*Nothing has changed/ })
  t.notMatch(refused.body.error, { message: /name it when it is opened/ }, 'a scope has no such field')
  t.equal((await post('/update_weights_from_disk', { ...body, weight_version: 'v1' })).status, 200)
  t.equal((await post('/end_weight_update')).status, 200)
  t.equal(engine.weightVersion, 'v1')
})

t.test('a remote SGLang gets no byte of an update that it cannot end that way', async t => {
  const heard: string[] = []
  const answers: Record<string, unknown> = {
    '/server_info': { tp_size: 1, max_total_num_tokens: 100 },
    '/model_info': { model_path: '/m', weight_version: '7' },
    '/v1/loads': { loads: [] }
  }
  const server = createHttpServer((request, response) => {
    heard.push(request.url!)
    const answer = answers[request.url!]
    response.statusCode = answer === undefined ? 404 : 200
    response.end(JSON.stringify(answer ?? {}))
  })
  await new Promise<void>(resolve => server.listen(0, '127.0.0.1', resolve))
  t.teardown(() => {
    server.closeAllConnections()
    server.close()
  })
  const folder = modelFolder(t)
  const { post } = await front(t, `http://127.0.0.1:${(server.address() as AddressInfo).port}`, folder)
  const body = { model_path: join(folder, 'adder'), on_running: 'finish_old' }
  const reply = await post('/update_weights_from_disk', body)
  t.match(reply.body, { success: false, error: { code: 'UNSUPPORTED', message: /on_running "finish_old"/ } })
  t.notOk(heard.some(path => path.includes('update')), heard.join())
})
