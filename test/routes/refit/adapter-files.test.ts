import { join } from 'node:path'
import t from 'tap'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import { eventually } from '../../helpers/eventually.ts'
import { saveAdapter } from '../../helpers/fakes/saved-adapter.ts'
import { engineServer, modelFolder } from '../../helpers/gateway.ts'
import { call, routeApp } from '../../helpers/route-app.ts'

t.test('a loaded adapter is read as the form that uploads it', async t => {
  const folder = modelFolder(t)
  const { url, engine } = await engineServer(t, folder, { enableLora: true, tp: 2 })
  for (const variant of [1, 2]) {
    const path = await saveAdapter(join(folder, 'adder-base'), join(folder, 'policy'), variant)
    await call(`${url}/load_lora_adapter`, { lora_name: 'team/p', lora_path: path })
    const reply = await fetch(`${url}/adapter_files/team%2Fp`)
    const length = Number(reply.headers.get('content-length'))
    const bytes = Buffer.from(await reply.clone().arrayBuffer())
    t.equal(bytes.length, length)
    const loaded = await fetch(`${url}/adapters/copy`, { method: 'POST', body: await reply.formData() })
    t.equal((await loaded.json() as { digest: string }).digest, engine.adapters!.get('team/p')!.digest)
  }
  t.match(await call(`${url}/adapter_files/none`), { status: 404, json: { error: { code: 'ADAPTER_UNKNOWN' } } })
})

t.test('a client that disconnects holds no slot', async t => {
  const folder = modelFolder(t)
  const { url } = await engineServer(t, folder, { enableLora: true })
  const path = await saveAdapter(join(folder, 'adder-base'), join(folder, 'policy'), 1, { rank: 64 })
  await call(`${url}/load_lora_adapter`, { lora_name: 'p', lora_path: path })
  for (let i = 0; i < 4; i++) {
    const gone = new AbortController()
    const reply = await fetch(`${url}/adapter_files/p`, { signal: gone.signal })
    await reply.body!.getReader().read()
    gone.abort()
  }
  const requests = async (): Promise<number> => (await call(`${url}/adapters/p`)).json.requests as number
  t.equal(await eventually(requests, count => count === 0), 0)
  t.equal((await call(`${url}/adapters/p?in_use=refuse`, undefined, { method: 'DELETE' })).status, 200)
})

t.test('adapters that the engine cannot read, or has none of, are refused', async t => {
  for (const adapters of [true, false]) {
    const { url } = await routeApp(t, { engine: new FakeEngine({ adapters }) })
    t.match(await call(`${url}/adapter_files/p`), { status: 400, json: { error: { code: 'UNSUPPORTED' } } })
  }
})
