import t from 'tap'
import { adapterBytes, CONFIG } from '../../helpers/fakes/adapter-files.ts'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import { call, routeApp } from '../../helpers/route-app.ts'
import type { Reply } from '../../helpers/route-app.ts'

type Part = readonly [name: string, content: string | Uint8Array]

const PARTS: readonly Part[] = [
  ['adapter_config.json', JSON.stringify(CONFIG)],
  ['adapter_model.safetensors', adapterBytes(3)]
]

async function upload (url: string, parts: readonly Part[]): Promise<Reply> {
  const form = new FormData()
  for (const [name, content] of parts) form.append('file', new Blob([content as string]), name)
  return await call(url, undefined, { method: 'POST', body: form })
}

t.test('an adapter is uploaded, listed, read and unloaded', async t => {
  const engine = new FakeEngine({ adapters: true })
  const { url } = await routeApp(t, { engine })
  const loaded = await upload(`${url}/adapters/team/policy?pinned=true`, PARTS)
  t.equal(loaded.status, 200, loaded.text)
  t.match(loaded.json, { name: 'team/policy', version: 1, path: '__upload__', pinned: true, tensors: 2, ms: Object })
  t.same(engine.adapters!.loads[0]!.config, CONFIG)
  // The order of the files does not matter.
  t.match((await upload(`${url}/adapters/team/policy`, PARTS.toReversed())).json, { version: 2, replaced: 1 })
  t.match(await upload(`${url}/adapters/team/policy?existing=refuse`, PARTS), {
    status: 409,
    json: { success: false, error: { code: 'CONFLICT' } }
  })
  t.match((await call(`${url}/adapters`)).json, {
    limits: { slots: 4, max_rank: 64, max_loaded: 16, target_modules: ['q_proj', 'v_proj'] },
    adapters: [{ name: 'team/policy', version: 2 }]
  })
  t.match((await call(`${url}/adapters/team/policy`)).json, { version: 2, resident: true })
  const removed = await call(`${url}/adapters/team/policy?in_use=wait`, undefined, { method: 'DELETE' })
  t.match([removed.status, removed.json.name], [200, 'team/policy'])
  t.same(engine.adapters!.unloads, ['team/policy wait'])
  for (const init of [{}, { method: 'DELETE' }]) {
    t.match(await call(`${url}/adapters/team/policy`, undefined, init), {
      status: 404,
      json: { error: { code: 'ADAPTER_UNKNOWN' } }
    })
  }
  t.equal((await call(`${url}/adapters/x?in_use=now`, undefined, { method: 'DELETE' })).status, 400)
})

t.test('forms that are no adapter are refused, and nothing is loaded', async t => {
  const engine = new FakeEngine({ adapters: true })
  const { url } = await routeApp(t, { engine })
  const [config, weights] = PARTS as [Part, Part]
  for (
    const [parts, message] of [
      [[config], /the upload has no file/],
      [[weights], /the form has no adapter_config\.json/],
      [[config, config, weights], /adapter_config\.json was sent twice/],
      [[config, ['adapter_model.bin', 'x']], /the form has "adapter_model\.bin"; an adapter is the files/],
      [[['adapter_config.json', '{'], weights], /adapter_config\.json is no JSON/],
      [[config, ['adapter_model.safetensors', weights[1].slice(0, 40)]], /adapter_model\.safetensors/],
      [[['adapter_config.json', ' '.repeat((4 << 20) + 1)], weights], /more than 4194304 bytes/],
      [[['adapter_config.json', `[${'{},'.repeat(350_000)}{}]`], weights], /has more values than can be parsed/]
    ] as const
  ) {
    const { status, json } = await upload(`${url}/adapters/x`, parts)
    t.ok(status === 400 || status === 413, `${status}`)
    t.match(json.message, message)
  }
  t.match((await call(`${url}/adapters/x`, {})).json.message, /expected a form/)
  t.same(engine.adapters!.loads, [])
  const plain = await routeApp(t)
  t.match(await upload(`${plain.url}/adapters/x`, PARTS), { status: 400, json: { error: { code: 'UNSUPPORTED' } } })
  t.equal((await call(`${plain.url}/adapters`)).status, 400)
})
