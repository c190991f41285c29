import { rmSync } from 'node:fs'
import t from 'tap'
import { ClientError } from '../src/client/client-error.ts'
import { RefitClient } from '../src/client/client.ts'
import type { GenerateOutput } from '../src/client/client.ts'
import { sseData } from '../src/client/sse-reader.ts'
import { adapterBytes, adapterFolder, CONFIG } from './helpers/fakes/adapter-files.ts'
import { FakeEngine } from './helpers/fake-engine.ts'
import { routeApp, until } from './helpers/route-app.ts'

t.test('the client speaks to a plugin under a prefix, with keys', async t => {
  const { url, engine } = await routeApp(t, { prefix: '/rollout', apiKey: 'a', adminApiKey: 'b' })
  const client = new RefitClient(`${url}/`, { apiKey: 'a', adminApiKey: 'b' })
  t.teardown(async () => await client.close())
  const output = await client.generate({
    text: 'abc',
    return_logprob: true,
    sampling_params: { max_new_tokens: 2 }
  }) as GenerateOutput
  t.equal(output.text, 'ab')
  t.same(output.meta_info.output_token_logprobs, [[-0.97, 97, null], [-0.98, 98, null]])
  t.equal(
    (await client.generate({ input_ids: [[5], [6]], sampling_params: { max_new_tokens: 1 } }) as GenerateOutput[])
      .length,
    2
  )
  await client.pause('in_place')
  t.match(await client.health(), { status: 'paused', paused: 'in_place' })
  await client.continue()
  await client.flushCache()
  await client.updateWeightVersion('9', { abortAllRequests: false })
  t.equal((await client.modelInfo()).weight_version, '9')
  t.equal((await client.serverInfo())['tp_size'], 2)
  t.same(Object.keys(await client.checksums()), ['a.weight', 'b.bias'])
  await client.checkWeights('snapshot')
  await client.checkWeights('compare')
  t.same(await client.getWeights('b.bias', 2), [0.5, 1.5])
  await client.abortAll()
  t.equal(engine.live, 0)
})

t.test('a stream yields the text so far, and leaving the loop ends the request', async t => {
  const engine = new FakeEngine({ stepMs: 2 })
  const { url } = await routeApp(t, { engine })
  const client = new RefitClient(url)
  t.teardown(async () => await client.close())
  const lengths: number[] = []
  for await (const output of client.stream({ input_ids: [5], sampling_params: { max_new_tokens: 4 } })) {
    lengths.push(output.output_ids.length)
  }
  t.equal(lengths.at(-1), 4)
  t.same(lengths, [...lengths].sort((a, b) => a - b))
  for await (const output of client.stream({ input_ids: [5], sampling_params: { max_new_tokens: 500 } })) {
    if (output.output_ids.length >= 3) break
  }
  await until(() => engine.live === 0)
  t.ok(engine.stats.generationTokens < 400)
})

t.test('an abort signal ends a request', async t => {
  const engine = new FakeEngine({ stepMs: 2 })
  const { url } = await routeApp(t, { engine })
  const client = new RefitClient(url)
  t.teardown(async () => await client.close())
  const controller = new AbortController()
  const pending = client.generate({ input_ids: [5], sampling_params: { max_new_tokens: 500 } }, controller.signal)
  await until(() => engine.live === 1)
  controller.abort()
  await t.rejects(pending, { name: 'AbortError' })
  await until(() => engine.live === 0)
})

t.test('errors of the server carry status, code and message, also in mid-stream', async t => {
  const engine = new FakeEngine({ stepMs: 2 })
  const { url } = await routeApp(t, { engine })
  const client = new RefitClient(url)
  t.teardown(async () => await client.close())
  await t.rejects(client.generate({}), {
    name: 'ClientError',
    status: 400,
    code: 'INVALID_REQUEST',
    message: /^Either text/
  })
  await t.rejects(client.updateWeightsFromDisk({ model_path: '/none' }), {
    status: 400,
    code: 'CHECKPOINT_PATH',
    message: /^Failed to get weights iterator/
  })
  const busy = client.generate({ input_ids: [5], rid: 'b', sampling_params: { max_new_tokens: 500 } })
  await until(() => engine.live === 1)
  await t.rejects(client.flushCache(), { status: 400, message: 'Flush cache failed.' })
  await client.abort('b')
  t.equal((await busy as GenerateOutput).meta_info.finish_reason!.type, 'abort')
  await t.rejects(
    (async () => {
      for await (const output of client.stream({ input_ids: [5], sampling_params: { max_new_tokens: 500 } })) {
        if (output.output_ids.length > 2) engine.weights = { state: 'torn', tensors: ['x'], reason: 'a read failed' }
      }
    })(),
    { name: 'ClientError', status: 503, code: 'ENGINE_TORN', message: 'a read failed' }
  )
})

t.test('memory is released and resumed, and its state read back', async t => {
  const { url, engine } = await routeApp(t)
  const client = new RefitClient(url)
  t.teardown(async () => await client.close())
  await client.releaseMemory()
  t.match(await client.health(), {
    status: 'asleep',
    weights: { state: 'asleep' },
    released_memory: { weights: 1000, kv_cache: 1000, cuda_graph: 1000 }
  })
  await t.rejects(client.generate({ input_ids: [5] }), { status: 503, code: 'ENGINE_ASLEEP' })
  await client.resumeMemory(['weights'])
  await client.resumeMemory(['kv_cache', 'cuda_graph'])
  t.match(await client.health(), { status: 'ok', released_memory: {} })
  t.same(engine.calls, ['release []', 'resume ["weights"]', 'resume ["kv_cache","cuda_graph"]'])
})

t.test('an unreachable server is an error that names the call', async t => {
  const client = new RefitClient('http://127.0.0.1:1')
  t.teardown(async () => await client.close())
  await t.rejects(client.modelInfo(), { name: 'ClientError', status: 0, message: /^GET \/model_info: .*ECONNREFUSED/ })
})

t.test('an error reply of any shape gives a message', async t => {
  const message = (status: number, text: string) => ClientError.of(status, text).message
  t.equal(message(500, ''), 'status 500')
  t.equal(message(502, '<html>'), '<html>')
  t.equal(message(401, '{"error":"Unauthorized"}'), 'Unauthorized')
  t.equal(message(400, '{"error":{"message":"m"}}'), 'm')
  t.equal(message(400, '{"message":"m","error":{"message":"n"}}'), 'm')
  t.equal(message(400, 'null'), 'null')
})

t.test('events are read from pieces of any size', async t => {
  const text = Buffer.from(': note\n\ndata: {"a":"€"}\n\nevent: x\ndata:{"b":1}\r\n\r\ndata: [DONE]\n\ndata: after\n\n')
  for (let size = 1; size < text.length; size++) {
    async function* pieces () {
      for (let i = 0; i < text.length; i += size) yield text.subarray(i, i + size)
    }
    const seen: string[] = []
    for await (const data of sseData(pieces())) seen.push(data)
    t.same(seen, ['{"a":"€"}', '{"b":1}'], `pieces of ${size}`)
  }
})

t.test('the client loads, replaces, lists and unloads LoRA adapters', async t => {
  const engine = new FakeEngine({ adapters: true })
  const { root, folder } = adapterFolder()
  t.teardown(() => {
    rmSync(root, { recursive: true })
  })
  const { url } = await routeApp(t, { engine, modelRoots: [root], apiKey: 'a', adminApiKey: 'b' })
  const client = new RefitClient(url, { apiKey: 'a', adminApiKey: 'b' })
  t.teardown(async () => await client.close())
  t.match(await client.loadAdapter({ name: 'team/ü', path: folder }), { name: 'team/ü', version: 1, path: folder })
  const weights = new Uint8Array(adapterBytes(3))
  t.match(await client.uploadAdapter({ name: 'team/ü', config: CONFIG, weights, pinned: true }), {
    name: 'team/ü',
    version: 2,
    replaced: 1,
    pinned: true
  })
  for (
    const load of [
      client.loadAdapter({ name: 'team/ü', path: folder, replace: false }),
      client.uploadAdapter({ name: 'team/ü', config: CONFIG, weights, replace: false })
    ]
  ) await t.rejects(load, { name: 'ClientError', code: 'CONFLICT' })
  t.match(await client.adapters(), [{ name: 'team/ü', version: 2 }])
  t.match(await client.unloadAdapter('team/ü', { inUse: 'wait' }), { version: 2 })
  t.same(engine.adapters!.unloads, ['team/ü wait'])
  const [newest, ...older] = await client.updates()
  t.match(newest, { kind: 'adapter', adapter: 'team/ü', outcome: 'refused', error: { code: 'CONFLICT' } })
  t.match(older.at(-1), { adapter: 'team/ü', outcome: 'done' })
  const { traceEvents, otherData } = await client.updateTrace(newest!.id)
  t.equal(otherData['update'], newest!.id)
  t.ok(traceEvents.length > 2)
  await t.rejects(client.updateTrace('a/b'), { status: 404, code: 'NOT_FOUND' })
  await t.rejects(client.unloadAdapter('team/ü'), { status: 404, code: 'ADAPTER_UNKNOWN' })
  t.same(await client.adapters(), [])
})
