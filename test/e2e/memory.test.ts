import t from 'tap'
import type { Test } from 'tap'
import { mkdtempSync, readFileSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { setFlagsFromString } from 'node:v8'
import { runInNewContext } from 'node:vm'
import { createEngine } from '../../src/app/create-engine.ts'
import type { EngineOptions } from '../../src/app/create-engine.ts'
import type { LocalEngine } from '../../src/engine/local-engine.ts'
import { native } from '../../src/native/load-addon.ts'
import { packageRoot } from '../../src/root.ts'
import { createServer } from '../../src/app/server.ts'
import { randomValues, writeModelFolder } from '../helpers/make-checkpoint.ts'
import { slowSteps } from '../helpers/slow-steps.ts'
import { tinyConfig } from '../helpers/tiny-config.ts'

// Release and resume over HTTP, in the orders that trainers send, on an engine whose weights are large enough to see in
// the process.

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')

// About 10 MB of weights.
const folder = mkdtempSync(join(tmpdir(), 'refit-memory-'))
for (const [name, seed] of [['a', 1], ['b', 2]] as const) {
  writeModelFolder(
    join(folder, name),
    tinyConfig('Qwen3ForCausalLM', {
      hidden_size: 384,
      intermediate_size: 1024,
      num_hidden_layers: 2,
      vocab_size: 2048,
      max_position_embeddings: 4096
    }),
    { values: randomValues(seed, 0.05) }
  )
}
t.teardown(() => {
  rmSync(folder, { recursive: true })
})

interface Reply {
  status: number
  body: any
}
interface Server {
  engine: LocalEngine
  post: (path: string, body?: unknown) => Promise<Reply>
  get: (path: string) => Promise<Reply>
  ok: (path: string, body?: unknown) => Promise<any>
  update: (name: string) => Promise<any>
  tokens: (ids: number[], more?: object) => Promise<number[]>
}

async function serve (t: Test, options: EngineOptions = {}): Promise<Server> {
  const engine = await createEngine(join(folder, 'a'), { threads: 1, maxTotalTokens: 8192, ...options })
  const app = await createServer({ engine, modelRoots: [folder], closeGraceMs: 500 })
  const url = await app.listen({ host: '127.0.0.1', port: 0 })
  t.teardown(async () => {
    native().armFault!(null)
    await app.close()
    await engine.close()
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
  return {
    engine,
    post,
    get: call,
    ok,
    update: async name =>
      await ok('/update_weights_from_disk', { model_path: join(folder, name), weight_version: name }),
    tokens: async (ids, more = {}) =>
      (await ok('/generate', {
        input_ids: ids,
        sampling_params: { temperature: 0, max_new_tokens: 12, ignore_eos: true, ...more }
      }))
        .output_ids
  }
}

const PROMPT = Array.from({ length: 100 }, (_, i) => (i * 37) % 2000 + 3)

setFlagsFromString('--expose-gc')
const collect: () => void = runInNewContext('gc')

/** Resident megabytes of the process after a garbage collection. */
function resident (): number {
  collect()
  return Number(readFileSync('/proc/self/statm', 'utf8').split(' ')[1]) * 4096 / 1e6
}

t.test(
  'colocated trainers can flush, release all, resume weights, update, resume the rest ' +
    'and generate',
  async t => {
    const { engine, get, post, ok, update, tokens } = await serve(t)
    const { addresses } = native().coreInfo(1)
    const a = await tokens(PROMPT)
    await update('b')
    const b = await tokens(PROMPT)
    t.notSame(a, b)
    const sums = (await ok('/weights_checker')).checksums

    t.equal((await get('/flush_cache')).status, 200)
    t.equal(await ok('/release_memory_occupation', {}), null)
    t.match((await get('/health')).body, { status: 'asleep', released_memory: { weights: engine.info.weightBytes } })
    t.equal((await post('/generate', { input_ids: [5] })).status, 503)
    t.equal(await ok('/resume_memory_occupation', { tags: ['weights'] }), null)
    t.match((await post('/generate', { input_ids: [5] })).body.error, {
      code: 'ENGINE_TORN',
      message: /came back empty/
    })
    await ok('/pause_generation', {})
    t.equal((await get('/flush_cache')).status, 200)
    await update('b')
    t.match(await ok('/continue_generation', {}), { status: 'asleep' })
    t.match((await post('/generate', { input_ids: [5] })).body.error, {
      code: 'ENGINE_ASLEEP',
      message: /kv_cache, cuda_graph/
    })
    t.equal(await ok('/resume_memory_occupation', { tags: ['kv_cache', 'cuda_graph'] }), null)
    t.same(await tokens(PROMPT), b)
    t.same((await ok('/weights_checker')).checksums, sums)
    t.same(native().coreInfo(1).addresses, addresses)

    // Only the KV cache, as trainers do that send the weights over a network meanwhile.
    await ok('/release_memory_occupation', { tags: ['kv_cache'] })
    await update('a')
    await ok('/resume_memory_occupation', { tags: ['kv_cache'] })
    t.same(await tokens(PROMPT), a)
  }
)

t.test('requests that a pause retracted are held through release, resume and update, and computed again', async t => {
  const { engine, ok, update, post, tokens } = await serve(t)
  const expected = await tokens(PROMPT, { max_new_tokens: 120 })
  await ok('/flush_cache')
  const hurry = slowSteps(t, 40, 100)
  const held = ok('/generate', {
    input_ids: PROMPT,
    sampling_params: { temperature: 0, max_new_tokens: 120, ignore_eos: true }
  })
  while (engine.stats.generationTokens < 160) await new Promise(resolve => setTimeout(resolve, 1))
  await ok('/pause_generation', { mode: 'in_place' })
  t.match(await post('/release_memory_occupation', {}), {
    status: 409,
    body: { error: { code: 'CONFLICT', message: /1 requests need their KV cache/ } }
  })
  await ok('/pause_generation', { mode: 'retract' })
  hurry()
  await ok('/release_memory_occupation', {})
  t.equal((await post('/generate', { input_ids: [5] })).status, 503, 'new ones are not held')
  await ok('/resume_memory_occupation', { tags: ['weights'] })
  await update('a')
  await ok('/resume_memory_occupation', {})
  await ok('/continue_generation', {})
  const { output_ids: ids, meta_info: info } = await held
  t.same(ids, expected, 'the same weights, the same tokens')
  t.match(info, { num_retractions: 1, finish_reason: { type: 'length' } })
})

t.test('with a copy of the weights the engine resumes without an update', async t => {
  const { ok, tokens, get } = await serve(t, { enableWeightsCpuBackup: true })
  const before = await tokens(PROMPT)
  const sums = (await ok('/weights_checker')).checksums
  await ok('/release_memory_occupation')
  await ok('/resume_memory_occupation')
  t.equal((await get('/ready')).status, 200)
  t.same((await ok('/weights_checker')).checksums, sums)
  t.same(await tokens(PROMPT), before)
  t.match((await get('/server_info')).body, { enable_weights_cpu_backup: true, weights: 'current' })
})

t.test('calls in a wrong order are 409 with the reason, and the engine continues', async t => {
  const { ok, post, get, update, tokens } = await serve(t)
  const before = await tokens(PROMPT)
  t.match(await post('/resume_memory_occupation'), {
    status: 409,
    body: { error: { code: 'CONFLICT', message: /not released/ } }
  })
  t.match(await post('/resume_memory_occupation', { tags: ['weights'] }), { status: 409 })
  t.equal((await tokens(PROMPT)).join(), before.join())
  await ok('/release_memory_occupation', { tags: ['weights'] })
  t.match(await post('/release_memory_occupation', { tags: ['weights'] }), {
    status: 409,
    body: { message: /memory of weights is released already/ }
  })
  t.match(await post('/update_weights_from_disk', { model_path: join(folder, 'b') }), {
    status: 409,
    body: { success: false, message: /cannot be updated while their memory is released/, error: { code: 'CONFLICT' } }
  })
  t.match(await post('/weights_checker', {}), { status: 409, body: { success: false, message: /cannot be read/ } })
  t.match(await post('/weights_checker', { action: 'reset_tensors' }), { status: 409 })
  t.match(await post('/get_weights_by_name', { name: 'model.norm.weight' }), { status: 409 })
  t.equal((await post('/update_weight_version', { new_version: 'x' })).status, 200, 'a label change writes no weight')
  t.equal((await get('/metrics')).status, 200)
  await ok('/resume_memory_occupation', { tags: ['weights'] })
  await update('a')
  t.same(await tokens(PROMPT), before)
})

t.test('a failed allocation gives 503 with the reason, memory stays released, and the next call works', async t => {
  const { ok, post, get, update, tokens } = await serve(t)
  const before = await tokens(PROMPT)
  await ok('/release_memory_occupation')
  native().armFault!({ point: 'alloc', at: 1, action: 'fail' })
  t.match(await post('/resume_memory_occupation'), {
    status: 503,
    body: { error: { code: 'NO_MEMORY', message: /memory of weights could not be allocated/ } }
  })
  t.match((await get('/health')).body, { status: 'asleep', weights: { tags: ['weights', 'kv_cache'] } })
  await ok('/resume_memory_occupation')
  await update('a')
  t.same(await tokens(PROMPT), before)
})

t.test(
  'fifty rounds of release, resume, update and generate free the memory each time, and ' +
    'it does not grow',
  async t => {
    const { engine, ok, update, tokens } = await serve(t)
    const expected: Record<string, number[]> = {}
    for (const name of ['b', 'a']) {
      await update(name)
      expected[name] = await tokens(PROMPT)
    }
    const weights = engine.info.weightBytes / 1e6
    const low: number[] = []
    const high: number[] = []
    const back: number[] = []
    for (let round = 0; round < 50; round++) {
      const name = round % 2 === 0 ? 'b' : 'a'
      const before = resident()
      await ok('/release_memory_occupation')
      low.push(resident())
      back.push(before - low.at(-1)!)
      await ok('/resume_memory_occupation', { tags: ['weights'] })
      await update(name)
      await ok('/resume_memory_occupation', { tags: ['kv_cache', 'cuda_graph'] })
      t.same(await tokens(PROMPT), expected[name])
      high.push(resident())
    }
    const median = (values: number[]): number => [...values].sort((a, b) => a - b)[values.length >> 1]!
    t.ok(
      median(back) > 0.9 * weights,
      `${median(back).toFixed(1)} MB came back, of ${weights.toFixed(1)} MB of weights`
    )
    // The optimizing compiler takes some 40 MB once, in one of the rounds. A leak would grow by the size of a model in
    // every round.
    for (const [state, values] of [['asleep', low], ['awake', high]] as const) {
      const growth = (median(values.slice(-10)) - median(values.slice(5, 15))) / 35
      t.ok(growth < weights / 4, `${state}, it grew by ${growth.toFixed(2)} MB in each of 35 rounds`)
    }
  }
)

t.test('a step on a lost device fails its requests with 503 at once, and the plugin stays up, not ready', async t => {
  const failures: string[] = []
  const { engine, post, get } = await serve(t, { onFailure: error => failures.push(error.message) })
  native().armFault!({ point: 'step', at: 3, action: 'fail' })
  const [one, two] = await Promise.all([
    post('/generate', { input_ids: PROMPT, rid: 'one', sampling_params: { max_new_tokens: 500, ignore_eos: true } }),
    post('/generate', { input_ids: PROMPT, rid: 'two', sampling_params: { max_new_tokens: 500, ignore_eos: true } })
  ])
  for (const reply of [one, two]) {
    t.match(reply, {
      status: 503,
      body: {
        error: { code: 'DEVICE_LOST', message: /^injected fault: rank 0 is lost in a step; requests in the step: / }
      }
    })
  }
  t.equal(failures.length, 1)
  t.match(failures[0], /one|two/)
  t.ok(engine.closed)
  t.notOk(engine.ready)
  for (const path of ['/health', '/ready']) t.match(await get(path), { status: 503, body: { status: 'unavailable' } })
  t.equal((await post('/generate', { input_ids: [5] })).status, 503)
  t.equal((await post('/release_memory_occupation')).status, 503)
})
