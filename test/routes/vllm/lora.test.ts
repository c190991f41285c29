import { rmSync } from 'node:fs'
import t from 'tap'
import type { Test } from 'tap'
import { RefitError } from '../../../src/errors.ts'
import { adapterFolder } from '../../helpers/fakes/adapter-files.ts'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import { call, routeApp } from '../../helpers/route-app.ts'
import type { RouteApp } from '../../helpers/route-app.ts'

interface AdapterApp extends RouteApp {
  folder: string
}

async function adapterApp (t: Test): Promise<AdapterApp> {
  const { root, folder } = adapterFolder()
  t.teardown(() => {
    rmSync(root, { recursive: true })
  })
  return { ...await routeApp(t, { engine: new FakeEngine({ adapters: true }), modelRoots: [root] }), folder }
}

t.test("vLLM's routes reply with its texts and its statuses", async t => {
  const { url, engine, folder } = await adapterApp(t)
  const load = async (fields: object) => await call(url + '/v1/load_lora_adapter', fields)
  const body = { lora_name: 'policy', lora_path: folder }
  const first = await load(body)
  t.equal(first.text, "Success: LoRA adapter 'policy' added successfully.")
  t.match(first.headers.get('content-type'), /^text\/plain/)
  t.match(await load(body), { status: 400, json: { error: { code: 'CONFLICT', message: /is already loaded/ } } })
  t.equal((await load({ ...body, load_inplace: true })).status, 200)
  t.equal(engine.adapters!.get('policy')!.version, 2)
  t.match(await load({ lora_name: 'policy' }), { status: 400, json: { error: { param: 'lora_path' } } })
  t.match(await load({ lora_name: 'x', lora_path: folder + '-v2' }), {
    status: 404,
    json: { error: { code: 'CHECKPOINT_PATH' } }
  })
  engine.adapters!.fault = new RefitError('ADAPTER_REFUSED', 'rank 128 is above 64')
  t.match(await load({ lora_name: 'x', lora_path: folder }), {
    status: 500,
    json: { error: { code: 'ADAPTER_REFUSED', message: 'LoRA adapter "x": rank 128 is above 64' } }
  })
  const unloaded = await call(url + '/v1/unload_lora_adapter', { lora_name: 'policy', lora_int_id: 2 })
  t.equal(unloaded.text, "Success: LoRA adapter 'policy' removed successfully.")
  t.match(await call(url + '/v1/unload_lora_adapter', { lora_name: 'policy' }), {
    status: 404,
    json: { error: { code: 'ADAPTER_UNKNOWN' } }
  })
  t.equal((await call(url + '/v1/unload_lora_adapter', {})).status, 400)
})

t.test("SkyRL's route replaces in place and returns the version", async t => {
  const { url, folder } = await adapterApp(t)
  for (const version of [1, 2]) {
    const { status, json } = await call(url + '/skyrl/v1/load_lora_adapter', { lora_name: 's', lora_path: folder })
    t.equal(status, 200)
    t.match(json, { status: 'ok', lora_name: 's', lora_int_id: version })
  }
  t.equal((await call(url + '/skyrl/v1/load_lora_adapter', { lora_name: 's' })).status, 400)
})

t.test("prime-rl's folder with an adapter becomes the meaning of the model's name", async t => {
  const { url, engine, folder } = await adapterApp(t)
  const reply = await call(url + '/update_weights', { weight_dir: folder })
  t.match(reply.json, { status: 'ok', adapter: { name: 'fake', version: 1 } }, reply.text)
  const made = await call(url + '/v1/completions', { model: 'fake', prompt: [5], max_tokens: 1 })
  t.equal(made.json.model, 'fake')
  t.equal(engine.requests.at(-1)!.adapter, 'fake')
  t.same(engine.calls, [], 'the weights were not updated')
})

t.test("AReaL's versions have names of their own, and the one before is unloaded", async t => {
  const { url, engine, folder } = await adapterApp(t)
  const load = async (version: number) =>
    await call(url + '/areal_update_weights_lora', {
      lora_model_path: folder,
      lora_name: `policy-v${version}`,
      lora_int_id: 1,
      base_model_name: 'fake'
    })
  t.match((await load(1)).json, { success: true, message: /TP rank: 0 success/ })
  t.match((await load(2)).json, { success: true })
  t.same(engine.adapters!.list().map(({ name }) => name), ['policy-v2'])
  t.match(await call(url + '/areal_update_weights_lora_xccl', {}), {
    status: 400,
    json: { success: false, error: { code: 'CONFLICT', message: /no adapter is announced/ } }
  })
  const meta = {
    names: ['a'],
    dtypes: ['float32'],
    shapes: [[1]],
    group_name: 'nowhere',
    lora_name: 'policy-v3',
    lora_int_id: 1,
    lora_target_modules: ['q_proj'],
    lora_rank: 1,
    lora_alpha: 2,
    lora_bias: 'none'
  }
  t.match(await call(url + '/areal_set_update_weight_meta_lora', meta), {
    status: 400,
    json: { error: { code: 'NOT_FOUND' } }
  })
})

t.test('the engine is described as vLLM describes one with adapters', async t => {
  const { url } = await adapterApp(t)
  const { json } = await call(url + '/server_info?config_format=json')
  t.match(json.vllm_config.lora_config, { max_lora_rank: 64, max_loras: 4, max_cpu_loras: 16 })
})
