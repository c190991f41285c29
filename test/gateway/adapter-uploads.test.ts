import { rmSync } from 'node:fs'
import { readFile } from 'node:fs/promises'
import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { readArchitecture } from '../../src/model/read-config.ts'
import { peftTensors, testAdapter } from '../helpers/adapters.ts'
import { arealTrainer } from '../helpers/fakes/areal-trainer.ts'
import { saveAdapter } from '../helpers/fakes/saved-adapter.ts'
import { engineServer, gatewayTo, modelFolder } from '../helpers/gateway.ts'
import type { EngineServer } from '../helpers/gateway.ts'
import { sharedMemory, tensorEntry } from '../helpers/shared-tensors.ts'

const FILES = ['adapter_config.json', 'adapter_model.safetensors']
const PROMPT = { input_ids: [5, 6, 7], sampling_params: { max_new_tokens: 1, temperature: 0 } }

async function fleet (t: Test) {
  const folder = modelFolder(t)
  const model = join(folder, 'adder-base')
  const start = async (options: Parameters<typeof engineServer>[2] = {}) =>
    await engineServer(t, folder, { enableLora: true, ...options })
  const save = async (variant: number, name = `policy-${variant}`): Promise<string> =>
    await saveAdapter(model, join(folder, name), variant)
  const form = async (variant: number): Promise<FormData> => {
    const path = await save(variant)
    const form = new FormData()
    for (const name of FILES) form.append('file', new Blob([await readFile(join(path, name))]), name)
    return form
  }
  return { folder, model, start, save, form }
}

const digests = (name: string, ...engines: EngineServer[]): (string | undefined)[] =>
  engines.map(({ engine }) => engine.adapters!.get(name)?.digest)

t.test('an uploaded adapter reaches every engine, and engines that join or restart later', async t => {
  const { start, form } = await fleet(t)
  const engines = [await start(), await start({ tp: 2 })] as const
  const gateway = await gatewayTo(t, engines.map(({ url }) => url))
  const upload = async (variant: number, query = '') =>
    await fetch(`${gateway.url}/adapters/team/p${query}`, { method: 'POST', body: await form(variant) })
  for (const variant of [1, 2]) {
    const reply = await upload(variant, '?pinned=true')
    t.equal(reply.status, 200, await reply.clone().text())
    const { digest, version } = await reply.json() as { digest: string, version: number }
    t.equal(version, variant)
    t.same(digests('team/p', ...engines), [digest, digest])
  }
  const [current] = digests('team/p', engines[0])
  const late = await start({ tp: 2 })
  await gateway.post('/workers', { url: late.url })
  await gateway.until(late.url, 'ready')
  t.same(digests('team/p', late), [current])
  t.match(late.engine.adapters!.get('team/p'), { pinned: true, path: '__upload__' })
  for (let i = 0; i < 8; i++) {
    const reply = await gateway.post('/generate', { ...PROMPT, lora_path: 'team/p' }, { 'x-session-id': `${i}` })
    t.match([reply.status, reply.body.meta_info?.lora?.digest], [200, current])
  }
  t.equal(engines[0].engine.adapters!.get('team/p')!.requests, 0, 'the engine that was read holds nothing for it')

  // The next version reaches the engine that joined, and a restarted engine gets that one.
  t.equal((await upload(3)).status, 200)
  const [third] = digests('team/p', engines[0])
  t.not(third, current)
  t.same(digests('team/p', engines[1], late), [third, third])
  await late.kill()
  await gateway.until(late.url, 'down')
  const again = await start({ port: late.port })
  await gateway.until(again.url, 'ready')
  t.same(digests('team/p', again), [third])

  t.equal((await fetch(`${gateway.url}/adapters/team/p`, { method: 'DELETE' })).status, 200)
  t.same(digests('team/p', ...engines, again), [undefined, undefined, undefined])
  const last = await start()
  await gateway.post('/workers', { url: last.url })
  await gateway.until(last.url, 'ready')
  t.same(digests('team/p', last), [undefined], 'it was unloaded through the gateway')
})

t.test('an adapter whose tensors came by handles reaches engines that join, twice', async t => {
  const { model, start } = await fleet(t)
  const first = await start()
  const gateway = await gatewayTo(t, [first.url])
  const send = async (variant: number) => {
    const adapter = testAdapter(await readArchitecture(model), {
      rank: 4,
      variant,
      only: module => !/embed_tokens|lm_head/.test(module)
    })
    const entry = tensorEntry(
      peftTensors(adapter).map(({ name, shape, data }) => ({
        name,
        memory: sharedMemory(t, data, 5),
        shape,
        dtype: 'float32'
      }))
    )
    const { status, body } = await gateway.post('/load_lora_adapter_from_tensors', {
      lora_name: 'actor',
      config_dict: adapter.config,
      serialized_named_tensors: [entry],
      upsert: true
    })
    t.equal(status, 200, JSON.stringify(body))
    return body.adapter.digest as string
  }
  let before: string | undefined
  for (const variant of [1, 2]) {
    const digest = await send(variant)
    t.not(digest, before)
    before = digest
    const late = await start({ tp: variant })
    await gateway.post('/workers', { url: late.url })
    await gateway.until(late.url, 'ready')
    t.same(digests('actor', first, late), [digest, digest])
  }
})

t.test("AReaL's broadcast adapter reaches engines that join, and the version before leaves all of them", async t => {
  const { model, start } = await fleet(t)
  const engines = [await start(), await start({ tp: 2 })]
  const gateway = await gatewayTo(t, engines.map(({ url }) => url))
  const send = await arealTrainer(t, gateway, model, 4)
  const names = (): string[][] => engines.map(({ engine }) => engine.adapters!.list().map(({ name }) => name))
  await send(1, 1)
  await send(2, 3)
  t.same(names(), [['p-v2'], ['p-v2']])
  const lines: string[] = []
  gateway.app.gateway.fleet.log.warn = (_fields, line) => {
    lines.push(line)
  }
  for (const tp of [1, 2]) {
    engines.push(await start({ tp }))
    const { url } = engines.at(-1)!
    await gateway.post('/workers', { url })
    await gateway.until(url, 'ready')
  }
  t.equal(new Set(digests('p-v2', ...engines)).size, 1)
  t.same(names(), [['p-v2'], ['p-v2'], ['p-v2'], ['p-v2']])
  t.same(lines, [], 'no engine is told to have missed the version before')
  // They are not in the group: the trainer would have to make it anew.
  await send(3, 2)
  t.same(names(), [['p-v3'], ['p-v3'], [], []])
  for (let i = 0; i < 8; i++) {
    const { status } = await gateway.post('/generate', { ...PROMPT, lora_path: 'p-v3' }, { 'x-session-id': `${i}` })
    t.equal(status, 200, 'engines that have it serve it')
  }
})

t.test('an adapter whose folder is gone or has changed is read from an engine that has it', async t => {
  const { start, save } = await fleet(t)
  const first = await start()
  const gateway = await gatewayTo(t, [first.url])
  for (const name of ['gone', 'changed']) {
    await gateway.post('/v1/load_lora_adapter', { lora_name: name, lora_path: await save(1, name) })
  }
  rmSync(await save(1, 'gone'), { recursive: true })
  await save(2, 'changed')
  const late = await start()
  await gateway.post('/workers', { url: late.url })
  await gateway.until(late.url, 'ready')
  for (const name of ['gone', 'changed']) t.same(digests(name, late), digests(name, first))
  t.match(digests('gone', late), [/^[0-9a-f]{16}$/])
})

t.test('an adapter that no engine has any more is missing from an engine that joins', async t => {
  const { start, form } = await fleet(t)
  const first = await start()
  const gateway = await gatewayTo(t, [first.url])
  await fetch(`${gateway.url}/adapters/a`, { method: 'POST', body: await form(1) })
  await fetch(`${gateway.url}/adapters/b`, { method: 'POST', body: await form(2) })
  // Past the gateway.
  await first.engine.adapters!.unload('a')
  const lines: string[] = []
  gateway.app.gateway.fleet.log.warn = (_fields, line) => {
    lines.push(line)
  }
  const late = await start()
  await gateway.post('/workers', { url: late.url })
  await gateway.until(late.url, 'ready')
  t.same(digests('a', late), [undefined])
  t.same(digests('b', late), digests('b', first))
  t.match(lines, [/^it lacks LoRA adapters: a: no engine has it any more: send it again$/])
  t.match(await gateway.get('/adapter_files/b'), {
    status: 400,
    body: { message: /the gateway reads adapters itself/ }
  })
})

t.test('an upload that an engine refuses is a 502 that names it', async t => {
  const { start, form } = await fleet(t)
  const [good, plain] = [await start(), await start({ enableLora: false })]
  const gateway = await gatewayTo(t, [good.url, plain.url])
  const reply = await fetch(`${gateway.url}/adapters/p`, { method: 'POST', body: await form(1) })
  t.match([reply.status, await reply.json()], [502, { message: new RegExp(`^1 of 2 engines failed: ${plain.url}: `) }])
  for (let i = 0; i < 8; i++) {
    const { status } = await gateway.post('/generate', { ...PROMPT, lora_path: 'p' }, { 'x-session-id': `${i}` })
    t.equal(status, 200, 'requests go to the engine that has it')
  }
})
