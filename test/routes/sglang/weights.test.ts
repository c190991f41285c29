import { mkdir, mkdtemp, rm, symlink, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { request } from 'undici'
import t from 'tap'
import type { Test } from 'tap'
import { call, routeApp, until } from '../../helpers/route-app.ts'

function safetensors (names: string[]): Buffer {
  const entries = names.map((name, i) => [name, { dtype: 'F32', shape: [2], data_offsets: [i * 8, i * 8 + 8] }])
  const header = Buffer.from(JSON.stringify(Object.fromEntries(entries)))
  const length = Buffer.alloc(8)
  length.writeBigUInt64LE(BigInt(header.length))
  return Buffer.concat([length, header, Buffer.alloc(names.length * 8)])
}

async function checkpoints (t: Test) {
  const root = await mkdtemp(join(tmpdir(), 'refit-routes-'))
  t.teardown(async () => await rm(root, { recursive: true }))
  const write = async (name: string, tensors: string[]) => {
    await mkdir(join(root, name))
    await writeFile(join(root, name, 'model.safetensors'), safetensors(tensors))
    return join(root, name)
  }
  const good = await write('good', ['a.weight', 'b.bias'])
  const strange = await write('strange', ['c.weight'])
  const app = await routeApp(t, { modelRoots: [root] })
  return { root, good, strange, ...app }
}

t.test('an update from disk writes, sets the label and reports', async t => {
  const { url, engine, good } = await checkpoints(t)
  const reply = await call(`${url}/update_weights_from_disk`, {
    model_path: good,
    load_format: 'auto',
    weight_version: '7'
  })
  t.equal(reply.status, 200)
  t.same(reply.json, {
    success: true,
    torn_count: 0,
    message: 'Succeeded to update model weights. Weight version updated to 7.',
    num_paused_requests: 0,
    report: {
      source: 'disk',
      tensors: 2,
      bytes: 64,
      missing: [],
      missing_count: 0,
      ignored: [],
      ms: { plan: 1, gate: 2, write: 3, verify: 4, total: 10 },
      gb_per_second: 0.5
    }
  })
  t.same(engine.calls, [
    'update {"abortAllRequests":false,"requireAll":"alone"}',
    'commit {"version":"7","flushCache":true}'
  ])
  t.match((await call(`${url}/model_info`)).json, { model_path: good, weight_version: '7' })
  t.equal((await call(`${url}/v1/models`)).json.data[0].id, 'fake', 'the served name stays')
})

t.test('every field of SGLang is accepted', async t => {
  const { url, engine, good } = await checkpoints(t)
  const reply = await call(`${url}/update_weights_from_disk`, {
    model_path: good,
    load_format: null,
    abort_all_requests: true,
    weight_version: null,
    is_async: false,
    keep_pause: true,
    token_step: 5,
    manifest: { a: 1 },
    torch_empty_cache: true,
    recapture_cuda_graph: true,
    flush_cache: 'false',
    rid: null,
    pp_rank: 3
  })
  t.equal(reply.json.message, 'Succeeded to update model weights.')
  t.same(engine.calls, [
    'update {"abortAllRequests":true,"requireAll":"alone"}',
    'abortAll',
    'commit {"flushCache":false}'
  ])
  t.equal(engine.weightVersion, 'default')
})

t.test('a source that cannot be opened is refused before the engine is called', async t => {
  const { url, engine, root } = await checkpoints(t)
  await symlink('/etc', join(root, 'out'))
  await mkdir(join(root, 'empty'))
  for (
    const path of [join(root, 'none'), '/etc', join(root, 'out'), join(root, 'empty'), `${root}/../../etc`, 'a\0b']
  ) {
    const reply = await call(`${url}/update_weights_from_disk`, { model_path: path })
    t.equal(reply.status, 400, path)
    t.match(reply.json, {
      success: false,
      message: /^Failed to get weights iterator: /,
      error: { code: 'CHECKPOINT_PATH' }
    })
    t.equal(reply.json.error.message, reply.json.message)
  }
  await writeFile(join(root, 'empty', 'model.safetensors'), 'lies')
  t.match((await call(`${url}/update_weights_from_disk`, { model_path: join(root, 'empty') })).json, {
    success: false,
    error: { code: 'CHECKPOINT_FORMAT' }
  })
  t.same(engine.calls, [])
})

t.test('invalid fields are refused in the shape of weight routes', async t => {
  const { url, good } = await checkpoints(t)
  const cases: [object, RegExp][] = [
    [{}, /^model_path: is required$/],
    [{ model_path: '' }, /^model_path: must not be empty$/],
    [{ model_path: 3 }, /^model_path: expected a string, got 3$/],
    [{ model_path: good, weight_version: 3 }, /^weight_version: expected a string or null, got 3$/],
    [{ model_path: good, flush_cache: null }, /^flush_cache: expected true or false, got null$/],
    [
      { model_path: good, load_format: 'flattened_bucket' },
      /^load_format: expected "auto" or "safetensors", got "flattened_bucket"$/
    ]
  ]
  for (const [body, message] of cases) {
    const reply = await call(`${url}/update_weights_from_disk`, body)
    t.equal(reply.status, 400)
    t.equal(reply.json.success, false)
    t.match(reply.json.message, message)
  }
})

t.test('a refused update is aborted, and a torn one reports its state', async t => {
  const { url, engine, good, strange } = await checkpoints(t)
  const refused = await call(`${url}/update_weights_from_disk`, { model_path: strange, weight_version: '8' })
  t.equal(refused.status, 400)
  t.match(refused.json, {
    success: false,
    message: 'Failed to update weights: the model has no tensor "c.weight"',
    error: { code: 'WEIGHTS_UNKNOWN_NAME' }
  })
  t.match(engine.calls.at(-1), /^abort update: the model has no tensor/)
  t.equal(engine.weightVersion, 'default')
  engine.failWriteAt = 1
  const torn = await call(`${url}/update_weights_from_disk`, { model_path: good, weight_version: '8' })
  t.equal(torn.status, 500)
  t.match(torn.json, { success: false, error: { code: 'WEIGHTS_TORN' } })
  t.equal(engine.weightVersion, 'default')
  t.equal((await call(`${url}/ready`)).status, 503)
  t.equal((await call(`${url}/generate`, { input_ids: [5] })).status, 503)
  engine.failWriteAt = null
  t.equal((await call(`${url}/update_weights_from_disk`, { model_path: good })).status, 200)
  t.equal((await call(`${url}/ready`)).status, 200)
})

t.test('a retry of an update that still runs joins it', async t => {
  const { url, engine, good } = await checkpoints(t)
  let release = () => {}
  engine.holdUpdate = new Promise(resolve => {
    release = resolve
  })
  const send = async (version: string) =>
    await call(`${url}/update_weights_from_disk`, { model_path: good, weight_version: version })
  const first = send('1')
  await until(() => engine.calls.length === 1)
  const again = send('1')
  const other = send('2')
  await until(() => engine.calls.length === 2)
  // Pause, flush and health do not wait for an update.
  t.equal((await call(`${url}/health`)).status, 200)
  t.equal((await call(`${url}/pause_generation`, {})).status, 200)
  t.equal((await call(`${url}/continue_generation`, {})).status, 200)
  release()
  const replies = await Promise.all([first, again, other])
  t.same(replies.map(reply => reply.status), [200, 200, 200])
  t.equal(engine.calls.filter(name => name.startsWith('update ')).length, 2)
})

t.test('update_weight_version sets the label and ends requests unless the body disables that', async t => {
  const { url, engine } = await routeApp(t)
  t.same((await call(`${url}/update_weight_version`, { new_version: 'a' })).json, {
    success: true,
    message: 'Weight version updated to a',
    new_version: 'a'
  })
  await call(`${url}/update_weight_version`, { new_version: 'b', abort_all_requests: false })
  t.same(engine.calls, ['abortAll'])
  for (const path of ['weight_version', 'get_weight_version']) {
    t.same((await call(`${url}/${path}`)).json, { weight_version: 'b' })
  }
  t.equal((await call(`${url}/update_weight_version`, {})).status, 400)
})

t.test('weights can be read by name with POST, a query, or a JSON body on a GET', async t => {
  const { url } = await routeApp(t)
  const matrix = [[0.5, 1.5, 2.5], [3.5, 4.5, 5.5]]
  t.same((await call(`${url}/get_weights_by_name`, { name: 'a.weight' })).json, matrix)
  t.same((await call(`${url}/get_weights_by_name`, { name: 'a.weight', truncate_size: '1' })).json, [matrix[0]])
  t.same((await call(`${url}/get_weights_by_name`, { name: 'b.bias' })).json, [0.5, 1.5, 2.5, 3.5])
  t.same((await call(`${url}/get_weights_by_name?name=b.bias&truncate_size=2`)).json, [0.5, 1.5])
  const get = async (body: string) => {
    const reply = await request(`${url}/get_weights_by_name`, {
      method: 'GET',
      body,
      headers: { 'content-type': 'application/json' }
    })
    return { status: reply.statusCode, json: await reply.body.json() as any }
  }
  t.same((await get('{"name":"b.bias","truncate_size":3}')).json, [0.5, 1.5, 2.5])
  t.match(await get('{"name":'), { status: 400, json: { message: /not valid JSON/ } })
  t.match(await get('{"truncate_size":3}'), { status: 400, json: { message: 'name: is required' } })
  t.match(await get('[]'), { status: 400, json: { message: /expected an object/ } })
  const unknown = await call(`${url}/get_weights_by_name`, { name: 'nope' })
  t.equal(unknown.status, 404)
  t.match(unknown.json.error, { message: 'the model has no tensor "nope"', code: 'NOT_FOUND' })
})

t.test('the weight checker supports checksum, snapshot, compare and reset_tensors', async t => {
  const { url, engine } = await routeApp(t)
  const act = async (action?: string) => await call(`${url}/weights_checker`, action === undefined ? {} : { action })
  const first = await act()
  t.equal(first.status, 200)
  t.match(first.json, {
    success: true,
    message: 'Success.',
    per_engine_checksum: /^[0-9a-f]{64}$/,
    ranks: [{ per_gpu_checksum: /^[0-9a-f]{64}$/, parallelism_info: { tp_rank: 0, tp_size: 2, rank: 0, size: 2 } }, {
      parallelism_info: { tp_rank: 1 }
    }]
  })
  t.same(Object.keys(first.json.checksums), ['a.weight', 'b.bias'])
  t.same((await call(`${url}/weights_checker`)).json, first.json, 'GET without a body')
  t.match((await act('compare')).json, { success: false, message: /there is no snapshot/ })
  t.same((await act('snapshot')).json, { success: true, message: 'Success.' })
  t.same((await act('compare')).json, { success: true, message: 'Success.' })
  engine.values.get('b.bias')!.values[2] = 99
  const different = await act('compare')
  t.equal(different.status, 400)
  t.match(different.json, { success: false, message: 'check tensor equality failed:\nb.bias' })
  t.equal((await act('reset_tensors')).status, 200)
  t.equal((await call(`${url}/generate`, { input_ids: [5] })).json.error.code, 'ENGINE_TORN')
  const viaGet = await request(`${url}/weights_checker`, {
    method: 'GET',
    body: '{"action":"snapshot"}',
    headers: { 'content-type': 'application/json' }
  })
  t.equal(viaGet.statusCode, 200)
  t.match((await act('explode')).json, {
    success: false,
    message: /^action: expected "checksum", "snapshot", "reset_tensors" or "compare", got "explode"$/
  })
})

t.test('metrics count updates by outcome', async t => {
  const { url, engine, good, strange } = await checkpoints(t)
  await call(`${url}/update_weights_from_disk`, { model_path: good, weight_version: '12' })
  await call(`${url}/update_weights_from_disk`, { model_path: strange })
  engine.failWriteAt = 0
  await call(`${url}/update_weights_from_disk`, { model_path: good })
  const { text } = await call(`${url}/metrics`)
  for (const outcome of ['success', 'refused', 'torn']) {
    t.match(text, new RegExp(`refit:weight_updates_total\\{outcome="${outcome}",model_name="fake"\\} 1\n`))
  }
  t.match(text, 'refit:weight_update_bytes_total{transport="disk",model_name="fake"} 64\n')
  t.match(text, 'refit:weight_version{model_name="fake"} 12\n')
  t.match(text, 'refit:weights_torn{model_name="fake"} 1\n')
  t.match(text, /refit:weight_update_seconds_count\{model_name="fake",phase="write"\} 1\n/)
})
