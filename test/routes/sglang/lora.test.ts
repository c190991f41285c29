import t from 'tap'
import { call, routeApp } from '../../helpers/route-app.ts'
import { sharedMemory, tensorEntry } from '../../helpers/shared-tensors.ts'
import type { SharedMemory } from '../../helpers/shared-tensors.ts'

const entryOf = (memory: SharedMemory): string =>
  tensorEntry([{ name: 'model.layers.0.self_attn.q_proj.lora_A.weight', memory, shape: [4], dtype: 'float32' }])

t.test("adapters are refused by name, in the form that SGLang's clients read", async t => {
  const { url, engine } = await routeApp(t)
  for (
    const path of [
      '/load_lora_adapter',
      '/unload_lora_adapter',
      '/load_lora_adapter_from_tensors',
      '/load_lora_adapter_from_distributed'
    ]
  ) {
    const { status, json } = await call(url + path, { lora_name: 'actor', lora_path: '/x' })
    t.equal(status, 400, path)
    const message = /^LoRA adapter "actor": this server does not apply adapters\. Merge it into the weights/
    t.match(json, {
      rid: null,
      http_worker_ipc: null,
      success: false,
      error_message: message,
      loaded_adapters: null,
      error: { code: 'UNSUPPORTED', message }
    })
  }
  t.same(engine.calls, [])
})

t.test("adapters are refused in the form that vLLM's clients read", async t => {
  const { url } = await routeApp(t)
  for (const path of ['/v1/load_lora_adapter', '/v1/unload_lora_adapter', '/skyrl/v1/load_lora_adapter']) {
    const { status, json } = await call(url + path, { lora_name: 'actor' })
    t.equal(status, 400, path)
    t.match(json, { error: { message: /adapter "actor"/, type: 'invalid_request_error', code: 'UNSUPPORTED' } })
  }
})

t.test('references of handles in the body are released, once for each pickle', async t => {
  const { url } = await routeApp(t)
  for (const field of ['serialized_tensors', 'serialized_named_tensors']) {
    const memories = [sharedMemory(t, Buffer.alloc(16), 5), sharedMemory(t, Buffer.alloc(16), 5)]
    const entries = memories.map(entryOf)
    const value = field === 'serialized_tensors' ? entries[0] : [...entries, entries[0]]
    t.equal(
      (await call(url + '/load_lora_adapter_from_tensors', { lora_name: 'a', config_dict: {}, [field]: value })).status,
      400
    )
    t.same(memories.map(memory => memory.count()), field === 'serialized_tensors' ? [4, 5] : [4, 4])
  }
})

t.test('values that are no JSON object are refused as bodies', async t => {
  const { url } = await routeApp(t)
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
