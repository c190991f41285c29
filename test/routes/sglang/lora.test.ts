import { createHash } from 'node:crypto'
import { mkdirSync, rmSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { RefitError } from '../../../src/errors.ts'
import { adapterFolder, CONFIG, Q } from '../../helpers/fakes/adapter-files.ts'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import { call, frames, routeApp } from '../../helpers/route-app.ts'
import type { RouteApp } from '../../helpers/route-app.ts'
import { sharedMemory, tensorEntry } from '../../helpers/shared-tensors.ts'
import type { SharedMemory } from '../../helpers/shared-tensors.ts'

const NAMES = [`${Q}.lora_A.weight`, `${Q}.lora_B.weight`]
const BYTES = Buffer.from(Float32Array.of(1, 2).buffer)
const SHA = createHash('sha256').update(BYTES).digest('hex')

const entryOf = (memories: readonly SharedMemory[], names: readonly string[] = NAMES): string =>
  tensorEntry(
    memories.map((memory, i) => ({ name: names[i]!, memory, shape: i === 0 ? [1, 2] : [2, 1], dtype: 'float32' }))
  )

async function withAdapters (t: Test, root?: string): Promise<RouteApp> {
  return await routeApp(t, {
    engine: new FakeEngine({ adapters: true }),
    ...root === undefined ? {} : { modelRoots: [root] }
  })
}

const tensors = (t: Test): SharedMemory[] => [sharedMemory(t, BYTES, 5), sharedMemory(t, BYTES, 5)]

t.test('without --enable-lora, adapters are refused by name and their handles are given back', async t => {
  const { url, engine } = await routeApp(t)
  const { root, folder } = adapterFolder()
  t.teardown(() => {
    rmSync(root, { recursive: true })
  })
  const body = { lora_name: 'actor', lora_path: folder, config_dict: CONFIG }
  for (const path of ['/load_lora_adapter', '/unload_lora_adapter']) {
    const { status, json } = await call(url + path, body)
    t.equal(status, 400, path)
    t.match(json, {
      rid: null,
      success: false,
      error_message: /LoRA is not enabled: start the server with --enable-lora/,
      loaded_adapters: null,
      error: { code: 'UNSUPPORTED' }
    })
  }
  for (const field of ['serialized_tensors', 'serialized_named_tensors']) {
    const memories = tensors(t)
    const entry = entryOf(memories)
    const { status } = await call(url + '/load_lora_adapter_from_tensors', {
      ...body,
      [field]: field === 'serialized_tensors' ? entry : [entry, entry]
    })
    t.equal(status, 400)
    t.same(memories.map(memory => memory.count()), [4, 4])
  }
  t.match((await call(url + '/generate', { input_ids: [5], lora_path: 'actor' })).json, {
    message: /^lora_path: LoRA adapters are not enabled/,
    error: { code: 'UNSUPPORTED' }
  })
  t.same(engine.calls, [])
})

t.test('an adapter is loaded from a folder, listed, replaced and unloaded', async t => {
  const { root, folder } = adapterFolder()
  t.teardown(() => {
    rmSync(root, { recursive: true })
  })
  const { url, engine } = await withAdapters(t, root)
  const body = { lora_name: 'actor', lora_path: folder, pinned: true }
  const first = await call(url + '/load_lora_adapter', body)
  t.equal(first.status, 200, first.text)
  t.match(first.json, {
    success: true,
    error_message: null,
    loaded_adapters: { actor: folder },
    status: 'ok',
    adapter: { name: 'actor', version: 1, pinned: true, tensors: 2, missing_count: 0, warnings: [] }
  })
  t.same(engine.adapters!.loads[0], {
    name: 'actor',
    config: CONFIG,
    names: NAMES,
    options: { path: folder, existing: 'replace', pinned: true }
  })
  const again = await call(url + '/load_lora_adapter', { ...body, load_inplace: false })
  t.equal(again.status, 400)
  t.match(again.json.error_message, /^LoRA adapter "actor": an adapter named "actor" is already loaded/)
  t.equal((await call(url + '/load_lora_adapter', body)).json.adapter.replaced, 1)
  t.match((await call(url + '/v1/models')).json.data, [
    { id: 'fake', parent: null },
    { id: 'actor', root: folder, parent: 'fake', adapter: { version: 2, digest: /^[0-9a-f]{16}$/ } }
  ])
  t.equal((await call(url + '/v1/models/actor')).json.parent, 'fake')
  t.match((await call(url + '/server_info')).json, {
    enable_lora: true,
    max_loras_per_batch: 5,
    lora_paths: [{ lora_name: 'actor', lora_path: folder, pinned: true }]
  })
  const unloaded = await call(url + '/unload_lora_adapter', { lora_name: 'actor' })
  t.match([unloaded.status, unloaded.json.loaded_adapters], [200, {}])
  t.match(await call(url + '/unload_lora_adapter', { lora_name: 'actor' }), {
    status: 400,
    json: { success: false, error: { code: 'ADAPTER_UNKNOWN' } }
  })
})

t.test('servers without the dialect of prime-rl refuse a name that is loaded, as SGLang does', async t => {
  const { root, folder } = adapterFolder()
  t.teardown(() => {
    rmSync(root, { recursive: true })
  })
  const { url } = await routeApp(t, {
    engine: new FakeEngine({ adapters: true }),
    modelRoots: [root],
    dialects: ['areal']
  })
  const body = { lora_name: 'a', lora_path: folder }
  t.equal((await call(url + '/load_lora_adapter', body)).status, 200)
  t.equal((await call(url + '/load_lora_adapter', body)).status, 400)
})

t.test('folders that are no adapter are refused with what they lack', async t => {
  const { root, folder } = adapterFolder()
  t.teardown(() => {
    rmSync(root, { recursive: true })
  })
  const { url, engine } = await withAdapters(t, root)
  const refused = async (path: string, message: RegExp): Promise<void> => {
    const { status, json } = await call(url + '/load_lora_adapter', { lora_name: 'a', lora_path: path })
    t.equal(status, 400)
    t.match(json.error_message, message)
  }
  await refused(join(root, 'nowhere'), /not inside the allowed roots/)
  await refused('/etc', /not inside the allowed roots/)
  await refused(root, /holds no adapter_config\.json/)
  await refused(join(folder, 'adapter_model.safetensors'), /is a file; name the folder/)
  writeFileSync(join(folder, 'adapter_config.json'), '{')
  await refused(folder, /adapter_config\.json is no JSON/)
  writeFileSync(join(folder, 'adapter_config.json'), Buffer.alloc((4 << 20) + 1, 32))
  await refused(folder, /bytes are too many/)
  const pickled = join(root, 'pickled')
  mkdirSync(pickled)
  writeFileSync(join(pickled, 'adapter_config.json'), JSON.stringify(CONFIG))
  await refused(pickled, /holds no adapter_model\.safetensors/)
  writeFileSync(join(pickled, 'adapter_model.bin'), '')
  await refused(pickled, /adapter_model\.bin, a pickle, .* safe_serialization=True/)
  for (const name of ['', 'x'.repeat(257), 'a\nb']) {
    t.equal((await call(url + '/load_lora_adapter', { lora_name: name, lora_path: folder })).status, 400)
  }
  t.same(engine.adapters!.loads, [])
})

t.test('errors of the engine keep their code, with the status 400 of SGLang', async t => {
  const { root, folder } = adapterFolder()
  t.teardown(() => {
    rmSync(root, { recursive: true })
  })
  const { url, engine } = await withAdapters(t, root)
  for (const code of ['ADAPTERS_FULL', 'ADAPTER_REFUSED'] as const) {
    engine.adapters!.fault = new RefitError(code, 'no')
    t.match(await call(url + '/load_lora_adapter', { lora_name: 'a', lora_path: folder }), {
      status: 400,
      json: { error_message: 'LoRA adapter "a": no', error: { code } }
    })
  }
  engine.adapters!.fault = null
  engine.adapters!.isZero = true
  engine.adapters!.missing = ['model.layers.0.self_attn.v_proj']
  await call(url + '/load_lora_adapter', { lora_name: 'a', lora_path: folder })
  const { adapter } = (await call(url + '/load_lora_adapter', { lora_name: 'a', lora_path: folder })).json
  t.match(adapter.warnings, [/^1 modules .*v_proj$/, /^every B is zero, although it replaces version 1/])
  t.match((await call(url + '/metrics')).text, /refit:adapter_loads_total{[^}]*outcome="refused"[^}]*} 2/)
})

t.test('tensors of a trainer are loaded, and its handles given back', async t => {
  const { url, engine } = await withAdapters(t)
  const body = { lora_name: 'actor', config_dict: CONFIG }
  const load = async (names: readonly string[], fields: object = {}) => {
    const memories = tensors(t)
    const entry = entryOf(memories, names)
    const reply = await call(url + '/load_lora_adapter_from_tensors', {
      ...body,
      serialized_named_tensors: [entry, entry],
      ...fields
    })
    t.same(memories.map(memory => memory.count()), [4, 4])
    return reply
  }
  const expected = Object.fromEntries(NAMES.map(name => [name, SHA]))
  const first = await load(NAMES, { expected_checksums: expected })
  t.match([first.status, first.json.checksums_verified], [200, true], first.text)
  t.same(first.json.loaded_adapters, { actor: '__tensor__' })
  t.equal((await load(NAMES)).status, 400, 'the name is loaded')
  const inMemory = NAMES.map(name => name.replace('.weight', '.default.weight'))
  t.match((await load(inMemory, { upsert: true })).json, { success: true, adapter: { version: 2 } })
  t.same(engine.adapters!.loads.map(({ names, config }) => [names, config]), [[NAMES, CONFIG], [inMemory, CONFIG]])

  const refused = async (fields: object, message: RegExp): Promise<void> => {
    const { status, json } = await load(NAMES, { lora_name: 'other', ...fields })
    t.equal(status, 400)
    t.match(json.error_message, message)
  }
  await refused({ expected_checksums: { ...expected, [NAMES[0]!]: '0'.repeat(64) } }, /is 0{64}, and the bytes have/)
  await refused({ expected_checksums: { [NAMES[0]!]: SHA } }, /lacks tensors that were sent: .*lora_B/)
  await refused({ expected_checksums: { ...expected, more: SHA } }, /names tensors that were not sent: "more"/)
  await refused({ added_tokens_config: { '<x>': 5 } }, /adapters that add tokens/)
  await refused({ load_format: 'direct' }, /come as a list or as "flattened_bucket"/)
  await refused({ config_dict: 3 }, /config_dict: expected an object/)
  t.equal(engine.adapters!.loads.length, 2)
})

t.test('kept tensors are loaded again, and given back when they are released', async t => {
  const { url, engine } = await withAdapters(t)
  const path = url + '/load_lora_adapter_from_tensors'
  const body = { lora_name: 'actor', config_dict: CONFIG, upsert: true }
  const memories = tensors(t)
  const counts = (): number[] => memories.map(memory => memory.count())
  const kept = { name: 'actor of rank 0', generation: 3 }
  const first = await call(path, { ...body, serialized_named_tensors: [entryOf(memories)], keep: kept })
  t.match([first.status, first.json.adapter?.version], [200, 1], first.text)
  const held = counts()
  t.same(held.map(count => count > 4), [true, true], 'not given back')
  for (const version of [2, 3]) {
    t.match((await call(path, { ...body, kept })).json, { success: true, adapter: { version } })
    t.same(counts(), held)
  }
  t.same(engine.adapters!.loads.map(({ names }) => names), [NAMES, NAMES, NAMES])

  const refused = async (fields: object, status: number, message: RegExp): Promise<void> => {
    const reply = await call(path, { ...body, ...fields })
    t.equal(reply.status, status, reply.text)
    t.match(reply.json.error_message, message)
  }
  await refused({ kept: { ...kept, generation: 4 } }, 400, /generation 3 is kept under "actor of rank 0", not 4/)
  await refused({ kept: { ...kept, name: 'other' } }, 400, /nothing is kept under "other"/)
  const more = tensors(t)
  await refused({ kept, serialized_named_tensors: [entryOf(more)] }, 400, /kept: it replaces the handles and keep/)
  t.same(more.map(memory => memory.count()), [4, 4])
  await refused({ kept, keep: kept }, 400, /kept: it replaces/)
  t.equal(engine.adapters!.loads.length, 3)
  t.equal((await call(url + '/release_kept_tensors', {})).status, 200)
  t.same(counts(), [4, 4])
})

t.test("a part of an adapter among the model's own weights is refused with its route", async t => {
  const { url } = await withAdapters(t)
  const memories = tensors(t)
  const { status, json } = await call(url + '/update_weights_from_tensor', {
    serialized_named_tensors: [entryOf(memories)]
  })
  t.equal(status, 400)
  t.match(json.message, /is a part of a LoRA adapter.*\/load_lora_adapter_from_tensors/)
})

t.test('values that are no JSON object are refused as bodies', async t => {
  const { url } = await withAdapters(t)
  for (
    const body of [null, 3, [], 'x', {}, { lora_name: 7, serialized_named_tensors: [1, null, '%%%'] }, {
      lora_name: 'x'.repeat(10_000)
    }]
  ) {
    const { status, json } = await call(url + '/load_lora_adapter_from_tensors', body)
    t.equal(status, 400)
    t.equal(json.success, false)
    t.ok(json.error_message.length < 500)
  }
})

t.test('lora_path chooses the adapter of each prompt, and the reply names its version', async t => {
  const { root, folder } = adapterFolder()
  t.teardown(() => {
    rmSync(root, { recursive: true })
  })
  const { url, engine } = await withAdapters(t, root)
  const load = async (name: string) => await call(url + '/load_lora_adapter', { lora_name: name, lora_path: folder })
  await load('a')
  await load('b')
  const digest = engine.adapters!.get('a')!.digest
  const one = await call(url + '/generate', {
    input_ids: [5, 6],
    lora_path: 'a',
    sampling_params: { max_new_tokens: 2 }
  })
  t.same(one.json.meta_info.lora, { name: 'a', version: 1, digest })
  const many = await call(url + '/generate', {
    input_ids: [[5], [6], [7]],
    lora_path: ['b', null, 'a'],
    sampling_params: { max_new_tokens: 1 }
  })
  t.match(many.json.map(({ meta_info: { lora } }: any) => lora?.version ?? null), [2, null, 1])
  t.same(engine.requests.map(({ adapter }) => adapter), ['a', 'b', undefined, 'a'])
  t.notOk('lora' in many.json[1].meta_info)
  const streamed = await call(url + '/generate', {
    input_ids: [5],
    lora_path: 'a',
    stream: true,
    sampling_params: { max_new_tokens: 1 }
  })
  t.match(frames(streamed.text).at(-2).meta_info.lora, { name: 'a', version: 1 })
  for (const path of ['c', ['c']]) {
    const { status, json } = await call(url + '/generate', { input_ids: [[5]], lora_path: path })
    t.equal(status, 400)
    t.match(json.message, /Got LoRA adapter that has never been loaded, or is unloaded: "c"\. LoRA adapters: "a", "b"/)
  }
  t.equal((await call(url + '/generate', { input_ids: [[5], [6]], lora_path: ['a'] })).status, 400)
})

t.test('a request that was checked before its adapter was unloaded is refused, not served by the base', async t => {
  const { root, folder } = adapterFolder()
  t.teardown(() => {
    rmSync(root, { recursive: true })
  })
  const { url, engine } = await withAdapters(t, root)
  await call(url + '/load_lora_adapter', { lora_name: 'a', lora_path: folder })
  const { generate } = engine
  engine.generate = async function* (request) {
    await engine.adapters!.unload('a')
    yield* generate.call(engine, request)
  }
  t.match(await call(url + '/generate', { input_ids: [5], lora_path: 'a' }), {
    status: 404,
    json: { error: { code: 'ADAPTER_UNKNOWN' } }
  })
})
