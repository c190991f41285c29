import t from 'tap'
import { call, routeApp } from '../../helpers/route-app.ts'

const post = async (url: string) => await call(url, undefined, { method: 'POST' })

t.test('load and ping answer as vLLM', async t => {
  const { url } = await routeApp(t)
  t.same((await call(`${url}/load`)).json, { server_load: 0 })
  for (const method of ['GET', 'POST']) t.equal((await call(`${url}/ping`, undefined, { method })).status, 200)
})

t.test('the KV cache alone is released after a pause only, and a wake-up leaves the pause', async t => {
  const { url, engine } = await routeApp(t)
  const early = await post(`${url}/release_kv_cache_memory`)
  t.equal(early.status, 409)
  t.match(early.json, { error: { message: /call \/pause/ } })
  t.same(engine.releasedMemory, {})
  await post(`${url}/pause?mode=keep`)
  t.same((await post(`${url}/release_kv_cache_memory`)).json, { status: 'kv_cache_released' })
  t.same(Object.keys(engine.releasedMemory).sort(), ['cuda_graph', 'kv_cache'])
  t.equal((await post(`${url}/release_kv_cache_memory`)).status, 200, 'a repeated call does no harm')
  await post(`${url}/wake_up`)
  t.same(engine.releasedMemory, {})
  t.same((await call(`${url}/is_paused`)).json, { is_paused: true })
})

t.test('vllm_config is in server_info for those who ask for it', async t => {
  const { url } = await routeApp(t)
  t.notOk('vllm_config' in (await call(`${url}/server_info`)).json)
  const { vllm_config: config } = (await call(`${url}/server_info?config_format=json`)).json
  t.match(config, {
    model_config: { dtype: /^torch\.(bfloat16|float32)$/ },
    parallel_config: { data_parallel_size: 1 },
    lora_config: null
  })
  t.type(config.weight_transfer_config.backend, 'string')
})

t.test('a transfer that never began can be shut down', async t => {
  const { url } = await routeApp(t)
  t.same((await post(`${url}/shutdown_weight_transfer_engine`)).json, { message: 'Weight transfer shut down' })
})
