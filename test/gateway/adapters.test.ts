import { rmSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { engineServer, gatewayTo, modelFolder } from '../helpers/gateway.ts'
import { saveAdapter } from '../helpers/fakes/saved-adapter.ts'

const PROMPT = { input_ids: [5, 6, 7], sampling_params: { max_new_tokens: 1, temperature: 0 }, return_logprob: true }

async function fleet (t: Test) {
  const folder = modelFolder(t)
  const adapter = async (variant: number): Promise<string> =>
    await saveAdapter(join(folder, 'adder-base'), join(folder, `policy-${variant}`), variant)
  const start = async (options: { port?: number, enableLora?: boolean, tp?: number } = {}) =>
    await engineServer(t, folder, { enableLora: true, ...options })
  return { folder, adapter, start }
}

t.test('an adapter is loaded into all engines, replaced and unloaded', async t => {
  const { adapter, start } = await fleet(t)
  const engines = [await start(), await start({ tp: 2 })]
  const gateway = await gatewayTo(t, engines.map(({ url }) => url))
  const load = async (variant: number, fields: object = {}) =>
    await gateway.post('/load_lora_adapter', { lora_name: 'p', lora_path: await adapter(variant), ...fields })
  const first = await load(1)
  t.equal(first.status, 200, JSON.stringify(first.body))
  const [one, other] = engines.map(({ engine }) => engine.adapters!.get('p')!)
  t.equal(one!.digest, other!.digest, 'whatever the number of ranks')
  t.same(Object.keys(first.body.engines), engines.map(({ url }) => url))
  for (let i = 0; i < 4; i++) {
    const { status, body } = await gateway.post('/generate', { ...PROMPT, lora_path: 'p' }, { 'x-session-id': `${i}` })
    t.match([status, body.meta_info?.lora], [200, { name: 'p', version: 1, digest: one!.digest }])
  }
  t.equal((await load(2)).status, 200)
  for (const { engine } of engines) t.equal(engine.adapters!.get('p')!.version, 2)
  t.match(await load(3, { load_inplace: false }), { status: 400, body: { message: /^2 of 2 engines failed/ } })
  t.same(Object.values(gateway.states()), ['ready', 'ready'], 'no weights have changed')
  t.equal((await gateway.post('/unload_lora_adapter', { lora_name: 'p' })).status, 200)
  t.match(await gateway.post('/generate', { ...PROMPT, lora_path: 'p' }), { status: 400 })
})

t.test('an engine that refuses an adapter is named, and requests of the adapter go to the others', async t => {
  const { adapter, start } = await fleet(t)
  const good = await start()
  const plain = await start({ enableLora: false })
  const gateway = await gatewayTo(t, [good.url, plain.url])
  const { status, body } = await gateway.post('/load_lora_adapter', { lora_name: 'p', lora_path: await adapter(1) })
  t.equal(status, 502)
  t.match(body.message, new RegExp(`^1 of 2 engines failed: ${plain.url}: .*LoRA is not enabled`))
  for (let i = 0; i < 8; i++) {
    const reply = await gateway.post('/generate', { ...PROMPT, lora_path: 'p' }, { 'x-session-id': `${i}` })
    t.equal(reply.status, 200)
    t.equal((await gateway.post('/v1/completions', { model: 'p', prompt: [5], max_tokens: 1 })).body.model, 'p')
  }
  t.same(Object.values(gateway.states()), ['ready', 'ready'])
})

t.test('an engine that joins or restarts gets the adapters that came from folders', async t => {
  const { adapter, start } = await fleet(t)
  const first = await start()
  const gateway = await gatewayTo(t, [first.url])
  const gone = await adapter(7)
  await gateway.post('/v1/load_lora_adapter', { lora_name: 'a', lora_path: await adapter(1) })
  await gateway.post('/v1/load_lora_adapter', { lora_name: 'b', lora_path: gone })
  rmSync(gone, { recursive: true })
  const late = await start()
  t.equal((await gateway.post('/workers', { url: late.url })).status, 202)
  await gateway.until(late.url, 'ready')
  const digest = first.engine.adapters!.get('a')!.digest
  t.equal(late.engine.adapters!.get('a')!.digest, digest)
  for (let i = 0; i < 8; i++) {
    const reply = await gateway.post('/generate', { ...PROMPT, lora_path: 'b' }, { 'x-session-id': `${i}` })
    t.equal(reply.status, 200)
  }
  const { port } = late
  await late.kill()
  await gateway.until(late.url, 'down')
  const again = await start({ port })
  await gateway.until(again.url, 'ready')
  t.equal(again.engine.adapters!.get('a')!.digest, digest)
})
