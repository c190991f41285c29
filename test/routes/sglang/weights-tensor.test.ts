import t from 'tap'
import { joinRegex } from '../../helpers/join-regex.ts'
import { call, routeApp, until } from '../../helpers/route-app.ts'
import { recordedPickles } from '../../helpers/pickles.ts'
import { sharedMemory, tensorEntry } from '../../helpers/shared-tensors.ts'
import type { SharedMemory } from '../../helpers/shared-tensors.ts'

const PATH = '/update_weights_from_tensor'
const data = Buffer.alloc(16, 1)
const entryOf = (memory: SharedMemory, name = 'b.bias'): string =>
  tensorEntry([{ name, memory, shape: [4], dtype: 'float32' }])

t.test('an update from tensors writes, releases references, sets the label and reports', async t => {
  const { url, engine } = await routeApp(t)
  const memory = sharedMemory(t, data)
  const reply = await call(url + PATH, { serialized_named_tensors: [entryOf(memory)], weight_version: '7' })
  t.equal(reply.status, 200)
  t.match(reply.json, {
    success: true,
    message: 'Success Weight version updated to 7.',
    torn_count: 0,
    report: { tensors: 1, missing_count: 0 }
  })
  t.same(engine.calls, ['update {"abortAllRequests":false}', 'commit {"version":"7","flushCache":true}'])
  t.equal(memory.count(), 1)
  const metrics = (await call(`${url}/metrics`)).text
  for (const name of ['files_opened', 'files_closed', 'shares_released']) {
    t.match(metrics, new RegExp(`^refit:tensor_${name}_total\\{.*\\} 1$`, 'm'))
  }
  t.match(metrics, /^refit:weight_updates_total\{outcome="success",.*\} 1$/m)
})

t.test('every field of SGLang is accepted', async t => {
  const { url, engine } = await routeApp(t)
  const entry = entryOf(sharedMemory(t, data))
  const reply = await call(url + PATH, {
    serialized_named_tensors: [entry, entry, entry],
    load_format: null,
    flush_cache: 'false',
    abort_all_requests: true,
    weight_version: null,
    disable_draft_model: true,
    selector: 'all',
    torch_empty_cache: true,
    rid: 'x'
  })
  t.equal(reply.json.message, 'Success')
  t.same(engine.calls, ['update {"abortAllRequests":true}', 'abortAll', 'commit {"flushCache":false}'])
})

t.test('a refusal has success false and a code, and releases the handles', async t => {
  const { url, engine } = await routeApp(t)
  const cases: Array<[fields: object, status: number, message: RegExp, code: string, name?: string]> = [
    [
      { load_format: 'my.module.loader' },
      400,
      joinRegex(
        /^load_format: expected null, "flattened_bucket" or "direct", got "my\.module\.loader"; others/,
        / are registered by --weight-loader$/
      ),
      'UNSUPPORTED'
    ],
    [{ load_format: 'flattened_bucket' }, 400, /a flattened bucket is a dict/, 'TENSOR_PAYLOAD'],
    [{ load_format: 7 }, 400, /^load_format: expected a string or null, got 7$/, 'INVALID_REQUEST'],
    [{ weight_version: 7 }, 400, /^weight_version: expected a string or null, got 7$/, 'INVALID_REQUEST'],
    [{ flush_cache: null }, 400, /^flush_cache: expected true or false/, 'INVALID_REQUEST'],
    [{}, 400, /^Failed to update weights: the model has no tensor "nobody"$/, 'WEIGHTS_UNKNOWN_NAME', 'nobody']
  ]
  for (const [fields, status, message, code, name] of cases) {
    const memory = sharedMemory(t, data)
    const reply = await call(url + PATH, { serialized_named_tensors: [entryOf(memory, name)], ...fields })
    t.equal(reply.status, status)
    t.match(reply.json, { success: false, message, error: { message, code } })
    t.equal(memory.count(), 1, code)
  }
  t.equal(engine.weightVersion, 'default')
  // One string instead of a list.
  const memory = sharedMemory(t, data)
  t.match((await call(url + PATH, { serialized_named_tensors: entryOf(memory) })).json, {
    success: false,
    error: { code: 'INVALID_REQUEST' }
  })
  t.equal(memory.count(), 1)
  for (
    const body of [{}, { serialized_named_tensors: [1] }, { serialized_named_tensors: null }, [], 'x', null, {
      serialized_named_tensors: []
    }, { serialized_named_tensors: ['%%%'] }]
  ) {
    const reply = await call(url + PATH, body)
    t.equal(reply.status, 400, JSON.stringify(body))
    t.equal(reply.json.success, false)
  }
})

t.test('without the key no handle in a body is opened or released', async t => {
  const { url, engine } = await routeApp(t, { apiKey: 'api', adminApiKey: 'admin' })
  const memory = sharedMemory(t, data)
  for (const key of ['', 'api', 'wrong']) {
    const reply = await call(url + PATH, { serialized_named_tensors: [entryOf(memory)] }, {
      method: 'POST',
      body: JSON.stringify({ serialized_named_tensors: [entryOf(memory)] }),
      headers: { 'content-type': 'application/json', authorization: `Bearer ${key}` }
    })
    t.equal(reply.status, 401)
  }
  t.equal(memory.count(), 2)
  t.same(engine.calls, [])
})

t.test('recorded exploits are refused, and the server continues', async t => {
  const { url } = await routeApp(t)
  for (const { name, pickle, refused } of recordedPickles('exploits')) {
    const reply = await call(url + PATH, { serialized_named_tensors: [pickle] })
    t.equal(reply.status, 400, name)
    t.equal(reply.json.error.code, refused, name)
  }
  t.equal((await call(url + PATH, { serialized_named_tensors: [entryOf(sharedMemory(t, data))] })).status, 200)
})

t.test('a retry of an update that still runs joins it, and references are released once', async t => {
  const { url, engine } = await routeApp(t)
  let release = () => {}
  engine.holdUpdate = new Promise(resolve => {
    release = resolve
  })
  const memory = sharedMemory(t, data, 5)
  const body = { serialized_named_tensors: [entryOf(memory)], weight_version: '1' }
  const replies = [call(url + PATH, body)]
  await until(() => engine.calls.length === 1)
  replies.push(call(url + PATH, body), call(url + PATH, body))
  const other = call(url + PATH, { ...body, serialized_named_tensors: [entryOf(sharedMemory(t, data))] })
  await until(() => engine.calls.length === 2)
  t.equal((await call(`${url}/health`)).status, 200)
  release()
  for (const reply of await Promise.all(replies)) t.equal(reply.json.message, 'Success Weight version updated to 1.')
  t.equal((await other).status, 200)
  t.equal(engine.calls.length, 4, 'two updates, two commits')
  t.equal(memory.count(), 4)
})

t.test('a body of handles may be larger than those of other routes', async t => {
  const { url } = await routeApp(t)
  const body = JSON.stringify({ serialized_named_tensors: ['A'.repeat(65 << 20)] })
  const send = async (path: string) =>
    await call(url + path, undefined, { method: 'POST', body, headers: { 'content-type': 'application/json' } })
  t.equal((await send('/update_weights_from_disk')).status, 413)
  t.match((await send(PATH)).json, { error: { code: 'PICKLE_MALFORMED' } })
})
