import t from 'tap'
import { join } from 'node:path'
import { packageRoot } from '../../src/root.ts'
import { sharedMemory, tensorEntry } from '../helpers/shared-tensors.ts'
import { slowSteps } from '../helpers/slow-steps.ts'
import { BUCKETS, serve, until, ENDLESS } from '../helpers/transaction-server.ts'
import type { Reply } from '../helpers/transaction-server.ts'

// Weight transactions over HTTP, on a real engine that generates meanwhile.

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')

t.test(
  'a transaction can be opened, written over several connections, queried, refused a ' +
    'commit, committed and queried again',
  async t => {
    const { ok, post, get, bucket, names, folder, engine } = await serve(t)
    const opened = await ok('/weight_transactions', {
      owner: 'trainer 3',
      expected: 'all',
      deadline: 300,
      weight_version: 'v1'
    })
    t.match(opened, {
      kind: 'transaction',
      state: 'open',
      expected_count: names.length,
      written_count: 0,
      missing_count: names.length,
      weight_version: 'v1',
      outcome: null
    })
    const path = `/weight_transactions/${String(opened.id)}`
    t.match((await get('/metrics')).body, /^refit:weight_transaction_open\{.*\} 1$/m)
    t.equal((await post('/generate', { text: '1+1=' })).status, 200, 'generation continues until the first write')
    for (
      const [stranger, body] of [
        ['/update_weights_from_disk', { model_path: join(folder, 'trained') }],
        ['/release_memory_occupation', {}],
        ['/begin_weight_update', {}],
        ['/end_weight_update', {}],
        ['/update_weight_version', { new_version: 'x' }],
        ['/weights_checker', { action: 'reset_tensors' }],
        ['/weight_transactions', { owner: 'trainer 4' }]
      ] as const
    ) {
      const reply = await post(stranger, body)
      t.equal(reply.status, 409, stranger)
      t.match(reply.body.error, {
        code: 'TRANSACTION_OPEN',
        message: /the weight transaction of trainer 3 is open, for (300|29\d) s more at most/
      })
    }
    const replies = await Promise.all(
      [0, 2].map(async index => await bucket('trained', index, { transaction: opened.id }))
    )
    for (const reply of replies) t.match(reply, { status: 200, body: { report: { transaction: opened.id } } })
    const { missing, ...open } = (await get(path)).body
    t.match(open, { state: 'open', writing: true, writes: 2 })
    t.same([...missing].sort(), names.filter((_, i) => i % BUCKETS === 1).sort())
    t.match(await post(`${path}/commit`), {
      status: 409,
      body: {
        success: false,
        error: { code: 'TRANSACTION_INCOMPLETE', message: /15 expected tensors have not been sent: model/ }
      }
    })
    t.match((await get('/server_info')).body, {
      status: 'not ready',
      weight_transaction: { id: opened.id },
      weight_version: 'default',
      weight_coverage: { since: 'transaction' }
    })
    await bucket('trained', 1, { transaction: opened.id })
    const committed = await ok(`${path}/commit`)
    t.match(committed, { state: 'committed', outcome: 'new', weight_version: 'v1', seconds_left: null })
    t.same(await ok(`${path}/commit`), committed)
    t.same((await get(path)).body, committed)
    t.match(await post(`${path}/abort`), { status: 409, body: { error: { code: 'TRANSACTION_ENDED' } } })
    t.match(await bucket('base', 0, { transaction: opened.id }), {
      status: 409,
      body: { error: { code: 'TRANSACTION_ENDED' } }
    })
    t.match(await ok('/generate', { text: '12+345=', sampling_params: { temperature: 0, max_new_tokens: 8 } }), {
      text: '357',
      meta_info: { weight_version: 'v1' }
    })
    t.match((await get('/metrics')).body, /^refit:weight_transaction_open\{.*\} 0$/m)
    t.equal(engine.weightVersion, 'v1')
    for (
      const [method, at] of [['get', '/weight_transactions/none'], ['post', '/weight_transactions/none/commit'], [
        'post',
        '/weight_transactions/none/abort'
      ]] as const
    ) {
      t.match(await (method === 'get' ? get(at) : post(at)), { status: 404, body: { error: { code: 'NOT_FOUND' } } })
    }
  }
)

t.test('bodies are strict, and a refused one opens nothing', async t => {
  const { post, get, names } = await serve(t)
  const owner = 'a'
  for (
    const [body, message] of [
      [{}, /owner/],
      [{ owner: '' }, /owner/],
      [{ owner: 7 }, /owner/],
      [{ owner, deadline: 0 }, /deadline/],
      [{ owner, deadline: 1e9 }, /deadline/],
      [{ owner, deadline: '5' }, /deadline/],
      [{ owner, expected: [] }, /expected/],
      [{ owner, expected: 'some' }, /expected/],
      [{ owner, expected: [names[0], 'model.nobody'] }, /model\.nobody/],
      [{ owner, expects: 'all' }, /expects/]
    ] as const
  ) {
    const reply = await post('/weight_transactions', body)
    t.equal(reply.status, 400, JSON.stringify(body))
    t.match(reply.body, { success: false, message })
  }
  t.equal((await post('/begin_weight_update', { deadline: -1 })).status, 400)
  t.same((await get('/weight_transactions')).body, { open: null })
})

t.test(
  'an abort while a write waits for running requests returns at once, and ' +
    'the requests continue',
  async t => {
    const { engine, ok, bucket, post, get } = await serve(t)
    slowSteps(t, 1)
    const request = post('/generate', ENDLESS)
    await until(() => engine.stats.generationTokens > 5)
    const { id } = await ok('/weight_transactions', { owner: 'trainer' })
    const write = bucket('trained', 0, { transaction: id })
    const queued: Promise<Reply>[] = []
    // A request that is held up shows that the write waits for the gate.
    await until(() => {
      if (engine.stats.queued === 0) {
        queued.push(post('/generate', { text: '1+1=', sampling_params: { max_new_tokens: 2 } }))
      }
      return engine.stats.queued > 0
    })
    t.match((await get(`/weight_transactions/${String(id)}`)).body, { writing: false, writes: 0 })
    t.match(await ok(`/weight_transactions/${String(id)}/abort`, { reason: 'in a hurry' }), {
      outcome: 'old',
      reason: 'in a hurry'
    })
    t.match(await write, { status: 409, body: { message: /was aborted: in a hurry/ } })
    for (const { status } of await Promise.all(queued)) t.equal(status, 200, 'begun as the gate was let go')
    t.equal(engine.stats.running, 3)
    await ok('/abort_request', { rid: 'endless' })
    for (const sample of (await request).body) t.match(sample.meta_info.finish_reason, { type: 'abort' })
    t.same(engine.weights, { state: 'current' })
  }
)

t.test('a retry of a bucket that is under way in a transaction is not written twice', async t => {
  const { app, engine, ok, bucket, post, get } = await serve(t)
  slowSteps(t, 1)
  const request = post('/generate', ENDLESS)
  await until(() => engine.stats.generationTokens > 5)
  const { id } = await ok('/weight_transactions', { owner: 'trainer' })
  let seen = 0
  app.server.on('request', () => {
    seen++
  })
  const writes = [bucket('trained', 0, { transaction: id }), bucket('trained', 0, { transaction: id })]
  const other = bucket('trained', 0)
  t.equal((await other).status, 409, 'the same body without the id is no retry')
  await until(() => seen === 3)
  await ok('/abort_request', { rid: 'endless' })
  await request
  for (const write of writes) t.equal((await write).status, 200)
  t.equal((await get(`/weight_transactions/${String(id)}`)).body.writes, 1)
  await bucket('trained', 0, { transaction: id })
  t.equal((await get(`/weight_transactions/${String(id)}`)).body.writes, 2, 'one that comes later is')
  await ok(`/weight_transactions/${String(id)}/abort`)
})

t.test('updates from shared memory can belong to a transaction, as updates from files can', async t => {
  const { engine, ok, post, names, get } = await serve(t)
  const name = names.find(one => one.endsWith('norm.weight'))!
  const { shape } = await engine.readWeight(name)
  const memory = sharedMemory(t, Buffer.alloc(shape[0]! * 2, 0x3f))
  const entry = tensorEntry([{ name, memory, shape }])
  const send = async (more: object): Promise<Reply> =>
    await post('/update_weights_from_tensor', { serialized_named_tensors: [entry], ...more })
  const { id } = await ok('/weight_transactions', { owner: 'trainer', expected: [name] })
  t.match(await send({ transaction: id, weight_version: 'v1' }), {
    status: 200,
    body: { message: 'Success Weight version will be v1 when its transaction ends.', report: { transaction: id } }
  })
  t.equal(engine.weightVersion, 'default')
  t.match(await ok(`/weight_transactions/${String(id)}/commit`), { written_count: 1 })
  t.match((await get('/get_weight_version')).body, { weight_version: 'v1' })
  t.equal((await engine.readWeight(name)).values[0], new Float32Array(Uint32Array.of(0x3f3f0000).buffer)[0])
})

t.test('a server that closes while a transaction is open replies to waiting requests and can exit', async t => {
  const { app, engine, ok, bucket, post } = await serve(t)
  await ok('/weight_transactions', { owner: 'trainer' }).then(async ({ id }) =>
    await bucket('trained', 0, { transaction: id })
  )
  const waiting = post('/generate', { text: '1+1=' }).catch(() => ({ status: 0 }))
  await until(() => engine.stats.queued > 0)
  const closed = app.close()
  engine.abortAll()
  await closed
  await engine.close()
  t.ok([0, 200, 503].includes((await waiting).status))
  t.ok(engine.closed)
  t.match(engine.weights, { state: 'torn', reason: /the engine is shutting down/ })
  t.equal(engine.transactions.current, null)
})
