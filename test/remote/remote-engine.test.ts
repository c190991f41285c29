import { readFileSync } from 'node:fs'
import { createServer as createHttpServer } from 'node:http'
import type { AddressInfo } from 'node:net'
import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { RemoteEngine } from '../../src/remote/remote-engine.ts'
import { createServer } from '../../src/app/server.ts'
import type { GenerateRequest, Scored } from '../../src/contract/rollout-engine.ts'
import { loadTokenizer } from '../../src/text/tokenizer.ts'
import { engineServer, modelFolder } from '../helpers/gateway.ts'
import { memorySource } from '../helpers/memory-source.ts'
import { rollout, rolloutRequest } from '../helpers/rollout.ts'

async function connect (t: Test, url: string, options: object = {}): Promise<RemoteEngine> {
  const engine = await RemoteEngine.connect(url, { pollMs: 50, ...options })
  t.teardown(async () => {
    await engine.close()
  })
  return engine
}

t.test('a remote refit engine generates the same tokens, logprobs and versions as the engine itself', async t => {
  const folder = modelFolder(t)
  const { url, engine } = await engineServer(t, folder)
  const remote = await connect(t, url)
  t.equal(remote.kind, 'refit')
  const { vocabSize, eosTokenIds, contextLength, ranks, architecture } = engine.info
  t.match(remote.info, { vocabSize, eosTokenIds, contextLength, ranks, architecture })
  const prompt = [10, 11, 12, 13, 14, 3]
  for (
    const [sampling, logprobs] of [[{}, {}], [{ temperature: 0, maxNewTokens: 1 }, {}], [{
      topK: 5,
      topP: 0.9,
      logitBias: [[7, 1.5]] as [number, number][],
      repetitionPenalty: 1.1
    }, { startLen: 0, top: 3, ids: [4, 5] }], [{ maxNewTokens: 0 }, { startLen: 0 }]] as const
  ) {
    // The second turn hits the prefix cache and computes the prompt's logprobs again: tokens and scores are the same.
    const ownTop: Scored[][] = []
    const farTop: Scored[][] = []
    const request = (): GenerateRequest => rolloutRequest(prompt, sampling as never, logprobs as never)
    const own = await rollout(engine, request(), ({ top }) => ownTop.push(...top))
    const far = await rollout(remote, request(), ({ top }) => farTop.push(...top))
    t.same(far.tokens, own.tokens)
    t.same(far.logprobs.map(Math.fround), own.logprobs.map(Math.fround))
    t.same(
      far.input.map(value => value === null ? null : Math.fround(value)),
      own.input.map(value => value === null ? null : Math.fround(value))
    )
    t.same(far.versions, own.versions)
    t.match(far.last, {
      finish: own.last.finish,
      promptTokens: own.last.promptTokens,
      completionTokens: own.last.completionTokens,
      seed: own.last.seed
    })
    t.same(ids(farTop), ids(ownTop))
  }
})

t.test('leaving the loop or aborting ends the request on the engine', async t => {
  const folder = modelFolder(t)
  const { url, engine } = await engineServer(t, folder)
  const remote = await connect(t, url)
  for await (const event of remote.generate(rolloutRequest([10, 11, 12], { maxNewTokens: 200 }))) {
    if (event.completionTokens > 2) break
  }
  await settled(() => engine.stats.running === 0)
  const long = rolloutRequest([10, 11, 12], { maxNewTokens: 200 })
  // The engine is paused, so the request cannot end before the abort.
  await engine.pause('in_place')
  const held = rollout(remote, long)
  await settled(() => engine.stats.running + engine.stats.queued > 0)
  t.ok(remote.abort(long.rid))
  t.match((await held).last.finish, { type: 'abort' })
  t.notOk(remote.abort(long.rid))
})

t.test('the plugin serves a remote engine: text, pause, updates, checksums, transactions and memory', async t => {
  const folder = modelFolder(t)
  const { url: farUrl, engine } = await engineServer(t, folder)
  const remote = await connect(t, farUrl)
  const app = await createServer({
    engine: remote,
    tokenizer: await loadTokenizer(join(folder, 'adder')),
    modelRoots: [folder],
    closeGraceMs: 200
  })
  const url = await app.listen({ host: '127.0.0.1', port: 0 })
  t.teardown(async () => {
    await app.close()
  })
  const call = async (path: string, init: RequestInit = {}): Promise<{ status: number, body: any }> => {
    const reply = await fetch(url + path, init)
    return { status: reply.status, body: await reply.json() }
  }
  const post = async (path: string, body: object = {}): Promise<{ status: number, body: any }> =>
    await call(path, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(body) })
  const sum = async (): Promise<any> =>
    (await post('/generate', { text: '12+34=', sampling_params: { temperature: 0, max_new_tokens: 8 } })).body

  const before = (await engine.checksums()).tensors
  const disk = await post('/update_weights_from_disk', { model_path: join(folder, 'adder'), weight_version: 'step-1' })
  t.equal(disk.status, 200)
  t.match(disk.body, { success: true, report: { tensors: 46, missing_count: 0 } })
  t.equal(engine.weightVersion, 'step-1')
  t.equal(engine.transactions.currentId, null)
  t.match(await sum(), { text: '46', meta_info: { weight_version: 'step-1' } })
  t.same(
    (await post('/weights_checker')).body.checksums,
    Object.fromEntries((await engine.checksums()).tensors.map(({ name, checksum }) => [name, checksum]))
  )

  const upload = await call('/update_weights_from_tensor?weight_version=step-2', {
    method: 'POST',
    headers: { 'content-type': 'application/octet-stream' },
    body: readFileSync(join(folder, 'adder-base', 'model.safetensors'))
  })
  t.equal(upload.status, 200, JSON.stringify(upload.body))
  t.equal(engine.weightVersion, 'step-2')
  t.same((await engine.checksums()).tensors, before)

  const nothing = await remote.update()
  t.match(await nothing.write(memorySource({} as never, [], 1)), { tensors: 0, bytes: 0 }, "a trainer's empty bucket")
  await nothing.commit({ version: 'empty' })
  t.equal(engine.weightVersion, 'empty')
  t.same((await engine.checksums()).tensors, before)
  t.equal((await post('/update_weight_version', { new_version: 'step-2' })).status, 200)

  const refused = await post('/update_weights_from_disk', { model_path: join(folder, 'nothing') })
  t.equal(refused.status, 400)
  t.match(refused.body, { success: false, error: { code: 'CHECKPOINT_PATH' } })

  t.equal((await post('/pause_generation', { mode: 'retract' })).status, 200)
  t.equal(engine.stats.paused, 'retract')
  t.equal((await call('/health')).body.status, 'paused')
  t.equal((await post('/continue_generation')).body.status, 'ok')

  const { body: { id } } = await post('/weight_transactions', { owner: 'far', expected: 'all' })
  t.equal(engine.transactions.currentId, id)
  t.equal(
    (await post('/update_weights_from_disk', {
      model_path: join(folder, 'adder'),
      transaction: id,
      weight_version: 'step-3'
    }))
      .status,
    200
  )
  t.equal(engine.weightVersion, 'step-2', 'the label waits')
  t.equal((await call(`/weight_transactions/${id}`)).body.state, 'open')
  t.equal((await post(`/weight_transactions/${id}/commit`)).body.outcome, 'new')
  t.equal(engine.weightVersion, 'step-3')
  t.equal((await post('/update_weight_version', { new_version: 'named' })).status, 200)
  t.equal(engine.weightVersion, 'named')

  t.equal((await post('/release_memory_occupation', { tags: ['kv_cache'] })).status, 200)
  t.equal(engine.weights.state, 'asleep')
  t.equal((await post('/generate', { text: '1+1=' })).status, 503)
  t.equal((await post('/resume_memory_occupation', { tags: ['kv_cache'] })).status, 200)
  t.equal((await sum()).text, '46')
  t.match(
    (await post('/get_weights_by_name', { name: 'model.norm.weight' })).body,
    Array.from((await engine.readWeight('model.norm.weight')).values)
  )
})

t.test('a remote refit engine drains, drops its cache, and sleeps with or without a copy of its weights', async t => {
  const folder = modelFolder(t)
  const { url, engine } = await engineServer(t, folder)
  const remote = await connect(t, url)
  const before = await remote.checksums()
  await rollout(
    remote,
    rolloutRequest([10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27], { maxNewTokens: 8 })
  )
  t.ok(engine.stats.cachedTokens > 0)
  await remote.dropCache({ retract: true })
  await settled(() => engine.stats.cachedTokens === 0)
  await remote.pause('wait')
  t.equal(engine.stats.paused, 'in_place')
  await remote.resume()
  for (const [keepWeights, state] of [[true, 'current'], [false, 'torn']] as const) {
    t.same((await remote.releaseMemory(['weights', 'kv_cache'], { keepWeights })).tags.includes('weights'), true)
    t.equal(engine.weights.state, 'asleep')
    await remote.resumeMemory()
    t.equal(engine.weights.state, state)
    t.equal(remote.weights.state, state)
    if (keepWeights) t.same(await remote.checksums(), before)
  }
})

t.test('an engine that is missing, unknown or breaks off is an error with a clear message', async t => {
  await t.rejects(RemoteEngine.connect('http://127.0.0.1:1'), {
    code: 'ENGINE_FAILED',
    message: /cannot be reached.*ECONNREFUSED/
  })
  await t.rejects(RemoteEngine.connect('ftp://x'), { code: 'INVALID_REQUEST' })
  const odd = await speaker(t, { '/version': '<html>' })
  await t.rejects(RemoteEngine.connect(odd.url), {
    code: 'ENGINE_FAILED',
    message: /is no engine of a known kind.*\/capabilities answered 404.*\/version answered 200/
  })
  const sglang = await speaker(t, {
    '/server_info': { tp_size: 2, pp_size: 2, max_total_num_tokens: 100 },
    '/model_info': { model_path: '/m', weight_version: '7' },
    '/v1/loads': { loads: [] }
  })
  const engine = await connect(t, sglang.url)
  t.match(engine, { kind: 'sglang', weightVersion: '7', info: { ranks: 4, modelPath: '/m' } })
  const meta = { prompt_tokens: 3, finish_reason: null, output_token_logprobs: [[-1, 5, null]] }
  const event = (output: object): string => `data: ${JSON.stringify(output)}\n\n`
  for (
    const [text, message] of [
      ['data: {"output_ids"', /ended the stream/],
      ['data: nonsense\n\n', /is no JSON object: nonsense/],
      [event({ text: 'x' }), /has no output_ids/],
      [event({ output_ids: [5, 6], meta_info: meta }), /has 1 logprobs for 2 tokens/],
      [event({ output_ids: [5], meta_info: meta }), /ended the stream of .* in the middle/],
      [event({ error: { message: 'out of memory' } }), /broke off: out of memory/]
    ] as const
  ) {
    sglang.answers['/generate'] = text
    await t.rejects(rollout(engine, rolloutRequest([1, 2, 3])), { code: 'ENGINE_FAILED', message }, text)
  }
  // Each event has all tokens so far, as in SGLang.
  sglang.answers['/generate'] = event({ output_ids: [5], meta_info: meta }) +
    event({
      output_ids: [5, 9],
      meta_info: {
        ...meta,
        weight_version: '8',
        finish_reason: { type: 'length', length: 2 },
        output_token_logprobs: [[-1, 5, null], [-2, 9, null]]
      }
    }) + 'data: [DONE]\n\n'
  t.match(await rollout(engine, rolloutRequest([1, 2, 3])), {
    tokens: [5, 9],
    logprobs: [-1, -2],
    versions: ['7', '8'],
    last: { finish: { type: 'length' } }
  })
})

t.test('a remote vLLM engine generates by its own route, pauses by its own paths, and refuses weights', async t => {
  const vllm = await speaker(t, {
    '/version': { version: '0.26' },
    '/get_world_size': { world_size: 2 },
    '/v1/models': { data: [{ id: 'm', root: '/m', max_model_len: 64 }] },
    '/pause': { status: 'paused' },
    '/resume': { status: 'resumed' }
  })
  const engine = await connect(t, vllm.url)
  t.match(engine, { kind: 'vllm', info: { ranks: 2, contextLength: 64, servedModelName: 'm' } })
  vllm.answers['/inference/v1/generate'] = {
    choices: [{
      token_ids: [4, 5, 6],
      finish_reason: 'stop',
      stop_reason: 6,
      logprobs: { content: [{ logprob: -1 }, { logprob: -2 }, { logprob: null }] },
      weight_versions: [{ version: 'a', start: 0, end: 1 }, { version: 'b', start: 1, end: 3 }]
    }]
  }
  t.match(await rollout(engine, rolloutRequest([1, 2])), {
    tokens: [4, 5, 6],
    logprobs: [-1, -2, -Infinity],
    versions: ['a', 'b', 'b'],
    last: { finish: { type: 'stop', matched: 6 } }
  })
  await engine.pause('in_place')
  t.ok(vllm.heard.includes('POST /pause?mode=keep&clear_cache=false'))
  t.equal(engine.stats.paused, 'in_place')
  await engine.resume()
  t.equal(engine.stats.paused, null)
  const update = await engine.update()
  await t.rejects(
    update.write({
      kind: 'stored',
      transport: { name: 'disk', readError: 'CHECKPOINT_FORMAT' },
      path: '/m',
      tensors: [],
      sources: [],
      verify: async () => {},
      close: async () => {}
    }),
    { code: 'UNSUPPORTED' }
  )
})

function ids (rows: [number, number][][]): number[][] {
  return rows.map(row => row.map(([, id]) => id))
}

async function settled (condition: () => boolean): Promise<void> {
  const end = performance.now() + 60_000
  while (!condition()) {
    if (performance.now() > end) throw new Error('it did not come true')
    await new Promise(resolve => setTimeout(resolve, 10))
  }
}

/** A server of fixed replies, in place of engines that cannot run here: texts as they are, objects as JSON. */
async function speaker (
  t: Test,
  answers: Record<string, unknown>
): Promise<{ url: string, answers: Record<string, unknown>, heard: string[] }> {
  const heard: string[] = []
  const server = createHttpServer((request, response) => {
    heard.push(`${request.method} ${request.url}`)
    request.resume()
    const answer = answers[request.url!.split('?')[0]!]
    response.statusCode = answer === undefined ? 404 : 200
    response.end(typeof answer === 'string' ? answer : JSON.stringify(answer ?? { detail: 'Not Found' }))
  })
  await new Promise<void>(resolve => server.listen(0, '127.0.0.1', resolve))
  t.teardown(() => {
    server.closeAllConnections()
    server.close()
  })
  return { url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`, answers, heard }
}

t.test('an update in a transaction passes its swap, and the remote engine refuses the other way', async t => {
  const folder = modelFolder(t)
  const { url, engine } = await engineServer(t, folder, { shadowWeights: true })
  const remote = await connect(t, url)
  const source = memorySource(engine.held!.store.table, ['model.norm.weight'], 1)
  for (const [opened, other] of [['demand', 'in_place'], ['in_place', 'demand']] as const) {
    const { id } = await remote.transactions.open({ owner: 'far', swap: opened })
    const wrong = await remote.update({ transaction: id, swap: other })
    await t.rejects(wrong.write(source), { code: 'CONFLICT' }, other)
    await wrong.abort('it was refused')
    const update = await remote.update({ transaction: id, swap: opened })
    t.match(await update.write(source), { tensors: 1 })
    t.match(await remote.transactions.abort(id, 'enough'), { state: 'aborted' })
  }
})
