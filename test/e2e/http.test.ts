import t from 'tap'
import { joinRegex } from '../helpers/join-regex.ts'
import type { Test } from 'tap'
import { cpSync, mkdtempSync, readFileSync, rmSync, truncateSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createEngine } from '../../src/app/create-engine.ts'
import type { LocalEngine } from '../../src/engine/local-engine.ts'
import { native } from '../../src/native/load-addon.ts'
import { packageRoot } from '../../src/root.ts'
import { createServer } from '../../src/app/server.ts'
import { slowSteps } from '../helpers/slow-steps.ts'

// The whole server on a real socket over the bundled models, with the addon that has fault points.

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')

interface Server {
  url: string
  engine: LocalEngine
  folder: string
  post: (path: string, body: unknown) => Promise<{ status: number, body: any }>
  get: (path: string) => Promise<{ status: number, body: any }>
  sum: (text: string) => Promise<string>
}

async function serve (t: Test, tp = 1): Promise<Server> {
  const folder = mkdtempSync(join(tmpdir(), 'refit-http-'))
  for (const model of ['adder', 'adder-base']) {
    cpSync(join(packageRoot, 'models', model), join(folder, model), { recursive: true })
  }
  const engine = await createEngine(join(folder, 'adder-base'), { threads: 1, tp, maxTotalTokens: 8192 })
  const app = await createServer({ engine, modelRoots: [folder], closeGraceMs: 500 })
  const url = await app.listen({ host: '127.0.0.1', port: 0 })
  t.teardown(async () => {
    native().armFault!(null)
    await app.close()
    await engine.close()
    rmSync(folder, { recursive: true })
  })
  const call = async (path: string, init: RequestInit = {}): Promise<{ status: number, body: any }> => {
    const reply = await fetch(url + path, init)
    const text = await reply.text()
    return {
      status: reply.status,
      body: /json/.test(reply.headers.get('content-type') ?? '') ? JSON.parse(text) : text
    }
  }
  const post = async (path: string, body: unknown): Promise<{ status: number, body: any }> =>
    await call(path, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(body) })
  const sum = async (text: string): Promise<string> =>
    (await post('/generate', { text, sampling_params: { temperature: 0, max_new_tokens: 8 } })).body.text
  return { url, engine, folder, post, get: call, sum }
}

const PROMPTS = readFileSync(join(packageRoot, 'examples/adder/prompts.txt'), 'utf8')
  .trim()
  .split('\n')
  .slice(0, 200)
  .map(line => line.split('=')[0]! + '=')

async function accuracy ({ post }: Server): Promise<number> {
  const { body } = await post('/generate', { text: PROMPTS, sampling_params: { temperature: 0, max_new_tokens: 8 } })
  const right = (body as { text: string }[]).filter(({ text }, i) => {
    const [a, b] = PROMPTS[i]!.slice(0, -1).split('+').map(Number)
    return Number(text) === a! + b!
  })
  return right.length / PROMPTS.length
}

for (const tp of [1, 2]) {
  t.test(`one update from disk turns the base into the adder and another one back, on ${tp} ranks`, async t => {
    const server = await serve(t, tp)
    const base = await accuracy(server)
    t.ok(base >= 0.3 && base <= 0.75, `base is right ${base}`)
    const before = (await server.post('/weights_checker', {})).body
    const update = await server.post('/update_weights_from_disk', {
      model_path: join(server.folder, 'adder'),
      weight_version: 'step-1',
      abort_all_requests: true
    })
    t.equal(update.status, 200)
    t.match(update.body, {
      success: true,
      message: 'Succeeded to update model weights. Weight version updated to step-1.',
      num_paused_requests: 0,
      report: { tensors: 46, missing_count: 0, bytes: 936896 }
    })
    t.ok(await accuracy(server) >= 0.99)
    t.equal((await server.get('/get_weight_version')).body.weight_version, 'step-1')
    const chat = await server.post('/v1/chat/completions', {
      messages: [{ role: 'user', content: 'What is 12+345?' }],
      temperature: 0
    })
    t.match(chat.body, {
      choices: [{ message: { content: '357' }, finish_reason: 'stop' }],
      metadata: { weight_version: 'step-1' }
    })
    await server.post('/update_weights_from_disk', { model_path: join(server.folder, 'adder-base') })
    t.same((await server.post('/weights_checker', {})).body, before, 'back to the same bits')
  })
}

t.test(
  'after an update that fails midway, the reply is 500 with the torn tensors, generation gets 503, ' +
    'health 200, and a repeated update heals the weights',
  async t => {
    const server = await serve(t, 2)
    native().armFault!({ point: 'read', at: 20, action: 'fail' })
    const failed = await server.post('/update_weights_from_disk', {
      model_path: join(server.folder, 'adder'),
      weight_version: 'never'
    })
    native().armFault!(null)
    t.equal(failed.status, 500)
    t.match(failed.body, {
      success: false,
      message: /the write failed at tensor ".*": injected fault.*Torn: .*Repeat the update/,
      error: { code: 'WEIGHTS_TORN' }
    })
    const refused = await server.post('/generate', { text: '1+1=' })
    t.equal(refused.status, 503)
    t.match(refused.body.error, {
      code: 'ENGINE_TORN',
      message: joinRegex(
        /^weights are torn \(.*injected fault.*\): (model\.[\w.]+, ){2}model\.[\w.]+( and \d+ more)?;/,
        / write them again with any weight update$/
      )
    })
    t.equal((await server.get('/health')).status, 200)
    t.equal((await server.get('/ready')).status, 503)
    t.equal((await server.get('/get_weight_version')).body.weight_version, 'default')
    const healed = await server.post('/update_weights_from_disk', {
      model_path: join(server.folder, 'adder'),
      weight_version: 'whole'
    })
    t.match(healed, { status: 200, body: { success: true } })
    t.equal((await server.get('/ready')).status, 200)
    t.equal(await server.sum('12+345='), '357')
  }
)

t.test(
  'a checkpoint that is broken, absent, outside or of another model is refused with its fault, ' +
    'and generation continues unchanged',
  async t => {
    const server = await serve(t)
    const before = (await server.post('/weights_checker', {})).body
    cpSync(join(server.folder, 'adder'), join(server.folder, 'short'), { recursive: true })
    truncateSync(join(server.folder, 'short/model.safetensors'), 500_000)
    const wrong: [string, RegExp][] = [
      [join(server.folder, 'short'), /model\.safetensors/],
      [join(server.folder, 'nowhere'), /not a readable checkpoint|nowhere/],
      ['/etc', /allowed|root/],
      [join(packageRoot, 'test/goldens/qwen3'), /allowed|root/]
    ]
    for (const [path, message] of wrong) {
      const reply = await server.post('/update_weights_from_disk', { model_path: path, weight_version: 'never' })
      t.equal(reply.status, 400, path)
      t.match(reply.body, { success: false, message })
    }
    cpSync(join(packageRoot, 'test/goldens/qwen3'), join(server.folder, 'other'), { recursive: true })
    const other = await server.post('/update_weights_from_disk', { model_path: join(server.folder, 'other') })
    t.match(other, { status: 400, body: { success: false, message: /shape|no tensor/ } })
    t.same((await server.post('/weights_checker', {})).body, before)
    t.equal((await server.get('/get_weight_version')).body.weight_version, 'default')
    t.equal((await server.post('/generate', { text: '1+1=' })).status, 200)
  }
)

t.test('during updates every generated answer comes from one whole checkpoint, and has its label', async t => {
  const server = await serve(t)
  const expected = new Map<string, string[]>()
  const ask = async (): Promise<{ text: string[], version: string[] }> => {
    const { body } = await server.post('/generate', {
      text: PROMPTS.slice(0, 24),
      sampling_params: { temperature: 0, max_new_tokens: 8 }
    })
    return { text: body.map((one: any) => one.text), version: body.map((one: any) => one.meta_info.weight_version) }
  }
  expected.set('default', (await ask()).text)
  await server.post('/update_weights_from_disk', { model_path: join(server.folder, 'adder'), weight_version: 'v1' })
  expected.set('v1', (await ask()).text)
  const updating = new AbortController()
  let answers = 0
  const clients = [0, 1, 2].map(async () => {
    while (!updating.signal.aborted) {
      const { text, version } = await ask()
      answers++
      for (const [i, label] of version.entries()) t.equal(text[i], expected.get(label)![i], { skip: false })
    }
  })
  for (let turn = 0; turn < 12; turn++) {
    const reply = await server.post('/update_weights_from_disk', {
      model_path: join(server.folder, turn % 2 === 0 ? 'adder-base' : 'adder'),
      weight_version: turn % 2 === 0 ? 'default' : 'v1'
    })
    t.equal(reply.status, 200)
  }
  updating.abort()
  await Promise.all(clients)
  t.ok(answers > 2, `${answers} batches in between`)
})

t.test('the checker detects noise in all weights, generation is refused, and a whole update heals it', async t => {
  const server = await serve(t)
  t.equal((await server.post('/weights_checker', { action: 'snapshot' })).status, 200)
  t.equal((await server.post('/weights_checker', { action: 'reset_tensors' })).status, 200)
  t.equal((await server.post('/weights_checker', { action: 'compare' })).status, 400)
  t.equal((await server.post('/generate', { text: '1+1=' })).status, 503)
  t.equal(
    (await server.post('/update_weights_from_disk', { model_path: join(server.folder, 'adder-base') })).status,
    200
  )
  t.equal((await server.post('/weights_checker', { action: 'compare' })).status, 200)
})

t.test(
  'a sample that ends without a new token after an update keeps the label of the ' +
    'weights that made its tokens',
  async t => {
    const server = await serve(t)
    slowSteps(t, 4)
    const sample = server.post('/generate', {
      input_ids: [49, 43, 49, 61],
      rid: 'held',
      sampling_params: { max_new_tokens: 2000, ignore_eos: true }
    })
    while (server.engine.stats.generationTokens < 5) await new Promise(resolve => setTimeout(resolve, 1))
    await server.post('/pause_generation', { mode: 'in_place' })
    await server.post('/update_weights_from_disk', {
      model_path: join(server.folder, 'adder'),
      weight_version: 'v2',
      flush_cache: false
    })
    await server.post('/abort_request', { rid: 'held' })
    const { body } = await sample
    t.match(body.meta_info, {
      finish_reason: { type: 'abort' },
      weight_version: 'default',
      weight_versions: [{ version: 'default', start: 0 }]
    })
    t.equal((await server.get('/get_weight_version')).body.weight_version, 'v2')
  }
)

t.test(
  "requests that would fill the server's memory are refused: endless scores, endless " +
    'tensors, empty checkpoints',
  async t => {
    const server = await serve(t)
    const scores = await server.post('/generate', {
      input_ids: [49],
      return_logprob: true,
      token_ids_logprob: new Array(1e6).fill(1),
      sampling_params: { max_new_tokens: 40 }
    })
    t.match(scores, { status: 400, body: { message: /at most the vocabulary's 260 token ids, got 1000000/ } })
    const rows = await server.post('/get_weights_by_name', { name: 'model.embed_tokens.weight', truncate_size: 1e9 })
    t.match(rows, { status: 400, body: { message: /at most 43690 rows/ } })
    const header = Buffer.from('{}      ')
    const length = Buffer.alloc(8)
    length.writeBigUInt64LE(BigInt(header.length))
    writeFileSync(join(server.folder, 'nothing.safetensors'), Buffer.concat([length, header]))
    const nothing = await server.post('/update_weights_from_disk', {
      model_path: join(server.folder, 'nothing.safetensors'),
      weight_version: 'never'
    })
    t.match(nothing, {
      status: 400,
      body: { success: false, message: /46 of the 46 tensors of the model are missing/ }
    })
    t.equal((await server.get('/get_weight_version')).body.weight_version, 'default')
  }
)
