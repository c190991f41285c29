import t from 'tap'
import { join } from 'node:path'
import { native } from '../../src/native/load-addon.ts'
import { packageRoot } from '../../src/root.ts'
import { eventually } from '../helpers/eventually.ts'
import { slowSteps } from '../helpers/slow-steps.ts'
import { BUCKETS, serve, until, PROMPTS, ENDLESS } from '../helpers/transaction-server.ts'
import type { Reply } from '../helpers/transaction-server.ts'

// A trainer's begin and end around an update of many requests, on a real engine that generates meanwhile.

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')

t.test(
  'during a scope with failing buckets every generated answer comes from one whole ' +
    'checkpoint, and has its label',
  async t => {
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
  }
)

for (const mode of ['in_place', 'retract', 'abort'] as const) {
  t.test(`paused with ${mode}, a continue inside a scope takes effect at its end`, async t => {
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

t.test("a pause between buckets of a scope gets a reply, and lasts beyond the scope's end", async t => {
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

t.test(
  'a scope whose trainer is gone ends at its deadline and names torn tensors; the ' +
    'next begin or update heals them',
  async t => {
    const { ok, bucket, post, get, engine, names, folder } = await serve(t)
    // If its deadline passes before its first bucket, that bucket is an update of its own.
    const first = await eventually(async () => {
      await ok('/begin_weight_update', { deadline: 0.1 })
      return await bucket('trained', 0)
    }, ({ body }) => body.report?.transaction !== undefined)
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
  }
)

t.test('a scope in which an unread request was refused cannot end before all tensors are written', async t => {
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
