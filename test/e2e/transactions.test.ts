import t from 'tap'
import type { Test } from 'tap'
import { cpSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createEngine } from '../../src/app/create-engine.ts'
import type { EngineOptions } from '../../src/app/create-engine.ts'
import type { LocalEngine } from '../../src/engine/local-engine.ts'
import { native } from '../../src/native/load-addon.ts'
import { packageRoot } from '../../src/root.ts'
import { createServer } from '../../src/app/server.ts'
import { headerLength, parseHeader } from '../../src/wire/safetensors/header.ts'
import { encodeSafetensors } from '../../src/wire/safetensors/encode.ts'
import { eventually } from '../helpers/eventually.ts'
import { sharedMemory, tensorEntry } from '../helpers/shared-tensors.ts'
import { slowSteps } from '../helpers/slow-steps.ts'

// Updates of many requests over HTTP, on a real engine that generates meanwhile.

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')

const BUCKETS = 3
const MODELS = { base: 'adder-base', trained: 'adder' }

interface Reply {
  status: number
  body: any
}
interface Server {
  app: Awaited<ReturnType<typeof createServer>>
  engine: LocalEngine
  folder: string
  names: string[]
  post: (path: string, body?: unknown) => Promise<Reply>
  get: (path: string) => Promise<Reply>
  ok: (path: string, body?: unknown) => Promise<any>
  /** Bucket `index` of a model, as one update. */
  bucket: (model: keyof typeof MODELS, index: number, more?: object) => Promise<Reply>
}

function tensorsOf (folder: string) {
  const bytes = readFileSync(join(folder, 'model.safetensors'))
  const length = headerLength(bytes, bytes.length, 'model')
  return parseHeader(bytes.subarray(8, 8 + length), bytes.length, 'model').tensors.map((
    { name, dtype, shape, begin, end }
  ) => ({ name, dtype, shape: [...shape], data: bytes.subarray(begin, end) }))
}

async function serve (t: Test, options: EngineOptions = {}): Promise<Server> {
  const folder = mkdtempSync(join(tmpdir(), 'refit-transactions-'))
  let names: string[] = []
  for (const [model, source] of Object.entries(MODELS)) {
    cpSync(join(packageRoot, 'models', source), join(folder, model), { recursive: true })
    const tensors = tensorsOf(join(folder, model))
    names = tensors.map(({ name }) => name)
    for (let index = 0; index < BUCKETS; index++) {
      mkdirSync(join(folder, `${model}-${index}`))
      writeFileSync(
        join(folder, `${model}-${index}/model.safetensors`),
        encodeSafetensors(tensors.filter((_, i) => i % BUCKETS === index))
      )
    }
  }
  const engine = await createEngine(join(folder, 'base'), { threads: 1, maxTotalTokens: 8192, ...options })
  const app = await createServer({ engine, modelRoots: [folder], closeGraceMs: 500 })
  const url = await app.listen({ host: '127.0.0.1', port: 0 })
  t.teardown(async () => {
    native().armFault!(null)
    await app.close()
    await engine.close()
    rmSync(folder, { recursive: true })
  })
  const call = async (path: string, init: RequestInit = {}): Promise<Reply> => {
    const reply = await fetch(url + path, init)
    const text = await reply.text()
    return {
      status: reply.status,
      body: /json/.test(reply.headers.get('content-type') ?? '') ? JSON.parse(text) : text
    }
  }
  const post = async (path: string, body: unknown = {}): Promise<Reply> =>
    await call(path, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(body) })
  const ok = async (path: string, body?: unknown): Promise<any> => {
    const reply = await post(path, body)
    if (reply.status !== 200) throw new Error(`${path} answered ${reply.status}: ${JSON.stringify(reply.body)}`)
    return reply.body
  }
  const bucket = async (model: keyof typeof MODELS, index: number, more: object = {}): Promise<Reply> =>
    await post('/update_weights_from_disk', { model_path: join(folder, `${model}-${index}`), ...more })
  return { app, engine, folder, names, post, get: call, ok, bucket }
}

async function until (condition: () => boolean | Promise<boolean>): Promise<void> {
  while (!await condition()) await new Promise(resolve => setTimeout(resolve, 2))
}

const PROMPTS = readFileSync(join(packageRoot, 'examples/adder/prompts.txt'), 'utf8')
  .trim()
  .split('\n')
  .slice(0, 16)
  .map(line => line.split('=')[0]! + '=')
/** A request that goes on until somebody ends it, with slow steps. */
const ENDLESS = {
  input_ids: [49, 43, 49, 61],
  rid: 'endless',
  sampling_params: { max_new_tokens: 2000, ignore_eos: true, n: 3 }
}

t.test('buckets in a scope, some of which fail, while clients generate: every answer is of one whole checkpoint, and its label says which', async t => {
  const { engine, folder, ok, bucket, post } = await serve(t, { tp: 2 })
  const expected = new Map<string, string[]>()
  const sums = new Map<string, unknown>()
  const ask = async (): Promise<{ text: string[], version: string[] }> => {
    const body = await ok('/generate', { text: PROMPTS, sampling_params: { temperature: 0, max_new_tokens: 8 } })
    return { text: body.map((one: any) => one.text), version: body.map((one: any) => one.meta_info.weight_version) }
  }
  for (const model of ['trained', 'base'] as const) {
    await ok('/update_weights_from_disk', { model_path: join(folder, model), weight_version: model })
    expected.set(model, (await ask()).text)
    sums.set(model, (await ok('/weights_checker')).checksums)
  }
  t.notSame(expected.get('base'), expected.get('trained'))
  const over = new AbortController()
  let answers = 0
  const clients = [0, 1, 2].map(async () => {
    while (!over.signal.aborted) {
      const { text, version } = await ask()
      answers++
      for (const [i, label] of version.entries()) {
        if (text[i] !== expected.get(label)![i]) t.fail(`${PROMPTS[i]!}${text[i]!} is not what ${label} says`)
      }
    }
  })
  for (let round = 0; round < 9; round++) {
    const model = round % 2 === 0 ? 'trained' : 'base'
    await ok('/begin_weight_update', { selector: 'all' })
    let steps = -1
    for (let index = 0; index < BUCKETS; index++) {
      if (index > 0 && round % 3 === index) {
        native().armFault!({ point: 'read', at: 2, action: 'fail' })
        t.equal((await bucket(model, index, { weight_version: model })).status, 500)
        native().armFault!(null)
        t.match(await post('/end_weight_update'), {
          status: 409,
          body: { success: false, error: { code: 'TRANSACTION_INCOMPLETE' } }
        })
      }
      t.match(await bucket(model, index, { weight_version: model }), {
        status: 200,
        body: { message: /Weight version will be .* when its transaction ends/ }
      })
      await new Promise(resolve => setTimeout(resolve, 3))
      if (steps < 0) steps = engine.stats.steps
      t.equal(engine.stats.steps, steps, 'no step is run on a mixture')
    }
    t.match(await ok('/end_weight_update'), {
      success: true,
      message: 'Success',
      transaction: {
        kind: 'scope',
        state: 'committed',
        writes: BUCKETS,
        missing_count: 0,
        outcome: 'new',
        weight_version: model
      }
    })
    t.same((await ok('/weights_checker')).checksums, sums.get(model))
    const before = answers
    await until(() => answers > before)
  }
  over.abort()
  await Promise.all(clients)
})

for (const mode of ['in_place', 'retract', 'abort'] as const) {
  t.test(`paused with ${mode}, a continue inside a scope opens nothing before its end`, async t => {
    const { engine, ok, bucket, get, post } = await serve(t)
    const hurry = slowSteps(t, 20)
    const request = post('/generate', {
      ...ENDLESS,
      sampling_params: { max_new_tokens: 600, ignore_eos: true, temperature: 0 }
    })
    await until(() => engine.stats.generationTokens > 20)
    await ok('/pause_generation', { mode })
    hurry()
    await ok('/begin_weight_update', { weight_version: 'v1' })
    await bucket('trained', 0)
    const { steps } = engine.stats
    const queued = ok('/generate', { text: PROMPTS[0], sampling_params: { temperature: 0, max_new_tokens: 8 } })
    t.match(await ok('/continue_generation'), {
      status: 'updating',
      message: /nothing is generated until the weight transaction of begin_weight_update/,
      coverage: { since: 'pause' }
    })
    t.match((await get('/health')).body, { status: 'updating', transaction: { writing: true } })
    t.match(await get('/health_generate'), { status: 200 })
    t.match(await get('/ready'), { status: 200 })
    t.notOk(engine.ready)
    t.equal((await post('/flush_cache')).status, 400, 'requests wait')
    await bucket('trained', 1)
    await new Promise(resolve => setTimeout(resolve, 20))
    t.equal(engine.stats.steps, steps)
    await bucket('trained', 2)
    t.equal((await get('/get_weight_version')).body.weight_version, 'default')
    await ok('/end_weight_update')
    t.equal((await queued).meta_info.weight_version, 'v1')
    const { body } = await request
    t.match(body.meta_info.finish_reason, mode === 'abort' ? { type: 'abort' } : { type: 'length', length: 600 })
    if (mode !== 'abort') t.match(body.meta_info.weight_versions, [{ version: 'default' }, { version: 'v1' }])
    t.same(await ok('/continue_generation'), {
      message: 'Generation continued successfully.',
      status: 'ok',
      coverage: { since: 'pause', missing: [], missing_count: 0 }
    })
  })
}

t.test("a pause between buckets of a scope is answered, and lasts beyond the scope's end", async t => {
  const { ok, bucket, get, engine } = await serve(t)
  await ok('/begin_weight_update')
  await bucket('trained', 0)
  for (const mode of ['abort', 'retract', 'in_place']) {
    t.match(await ok('/pause_generation', { mode }), { status: 'ok' })
  }
  for (const index of [1, 2]) await bucket('trained', index)
  await ok('/end_weight_update', { weight_version: 'v1' })
  t.match((await get('/health')).body, { status: 'paused', weight_version: 'v1' })
  const queued = ok('/generate', { text: '12+345=', sampling_params: { temperature: 0, max_new_tokens: 8 } })
  await until(() => engine.stats.queued > 0)
  await ok('/continue_generation')
  t.match(await queued, { text: '357', meta_info: { weight_version: 'v1' } })
})

t.test('a scope whose trainer is gone ends at its deadline and names torn tensors; the next begin or update heals them', async t => {
  const { ok, bucket, post, get, engine, names, folder } = await serve(t)
  // Its deadline may come before its first bucket, which is an update of its own then.
  const first = await eventually(async () => {
    await ok('/begin_weight_update', { deadline: 0.1 })
    return await bucket('trained', 0)
  }, ({ body }) => body.report.transaction !== undefined)
  t.equal(first.status, 200)
  const waiting = post('/generate', { text: '1+1=' })
  await until(async () => (await get('/weight_transactions')).body.open === null)
  const third = names.filter((_, i) => i % BUCKETS === 0)
  t.match((await get('/health')).body, {
    status: 'torn',
    weights: {
      torn_count: third.length,
      reason: /was aborted after \d+ tensors of it had been written: nothing came for 0.1 s/
    },
    transaction: null
  })
  t.match(await waiting, { status: 503, body: { error: { code: 'ENGINE_TORN' } } })
  t.match(await post('/end_weight_update'), {
    status: 409,
    body: { success: false, message: /nothing came for 0.1 s/, error: { code: 'TRANSACTION_ENDED' } }
  })
  t.equal(engine.weightVersion, 'default')

  await ok('/begin_weight_update')
  await bucket('trained', 0)
  await ok('/begin_weight_update')
  for (let index = 0; index < BUCKETS; index++) await bucket('trained', index, { weight_version: 'v1' })
  t.match(await ok('/end_weight_update'), { transaction: { torn_count: 0 } })
  t.match(await ok('/end_weight_update', {}), { transaction: { weight_version: 'v1' } }, 'a retry of the end')
  t.match(await ok('/generate', { text: '12+345=', sampling_params: { temperature: 0, max_new_tokens: 8 } }), {
    text: '357',
    meta_info: { weight_version: 'v1' }
  })
  await ok('/update_weights_from_disk', { model_path: join(folder, 'base') })
})

t.test('a scope with a request that was refused unread cannot end before all tensors are written', async t => {
  const { ok, post, bucket, folder, app } = await serve(t)
  const bad: Array<[what: string, send: () => Promise<Reply>]> = [
    [
      'a checkpoint that is none',
      async () => await post('/update_weights_from_disk', { model_path: join(folder, 'nowhere') })
    ],
    [
      'a pickle that is none',
      async () => await post('/update_weights_from_tensor', { serialized_named_tensors: ['bm8gcGlja2xl'] })
    ],
    ['a file that is none', async () => {
      const reply = await app.inject({
        method: 'POST',
        url: '/update_weights_from_tensor',
        headers: { 'content-type': 'application/octet-stream' },
        payload: Buffer.from('no safetensors')
      })
      return { status: reply.statusCode, body: reply.json() }
    }]
  ]
  for (const [what, send] of bad) {
    await ok('/begin_weight_update', {})
    t.equal((await bucket('trained', 0, { weight_version: 'v1' })).status, 200)
    t.equal((await send()).status, 400, what)
    t.match(await post('/end_weight_update', {}), {
      status: 409,
      body: {
        error: { code: 'TRANSACTION_INCOMPLETE', message: /a request in it was refused before its tensors were known/ }
      }
    }, what)
    for (const index of [1, 2]) await bucket('trained', index)
    await ok('/end_weight_update', {})
  }
})

t.test('an end without a begin does nothing, and reports that', async t => {
  const { ok } = await serve(t)
  t.same(await ok('/end_weight_update'), { success: true, message: 'Success', transaction: null })
})

t.test('a transaction is opened, written over several connections, queried, refused a commit, committed and queried again', async t => {
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
  t.equal((await post('/generate', { text: '1+1=' })).status, 200, 'generation goes on until something is written')
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
      message: /the weight transaction of trainer 3 is open, for (300|299) s more at most/
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
})

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

t.test('an abort while a write waits for running requests is answered at once, and the requests notice nothing', async t => {
  const { engine, ok, bucket, post, get } = await serve(t)
  slowSteps(t, 1)
  const request = post('/generate', ENDLESS)
  await until(() => engine.stats.generationTokens > 5)
  const { id } = await ok('/weight_transactions', { owner: 'trainer' })
  const write = bucket('trained', 0, { transaction: id })
  const queued: Promise<Reply>[] = []
  // Until one is held up, which shows that the write waits for the gate.
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
})

t.test("a retry of a bucket that is under way in a transaction is not written twice", async t => {
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

t.test('updates from shared memory belong to transactions as updates from files do', async t => {
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

t.test('a server that ends while a transaction is open answers waiting requests, and its process can end', async t => {
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
