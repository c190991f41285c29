import t from 'tap'
import { ask, engineServer, gatewayTo, modelFolder } from '../helpers/gateway.ts'

const refused = (name: string, code: string, count: number): RegExp =>
  new RegExp(`^refit:${name}\\{code="${code}"[^}]*\\} ${count}$`, 'm')

t.test('a server and a gateway count what they refuse, by code', async t => {
  const engine = await engineServer(t, modelFolder(t), { maxBodyBytes: 1000 })
  const gateway = await gatewayTo(t, [engine.url])
  const post = async (body: object): Promise<number> => (await gateway.post('/generate', body)).status
  const texts = async (): Promise<string[]> => [
    await (await fetch(`${engine.url}/metrics`)).text(),
    (await gateway.get('/metrics')).body
  ]
  for (const text of await texts()) t.match(text, /requests_refused_total\{code="BODY_TOO_LARGE"[^}]*\} 0$/m)
  t.equal(await post(ask('1+1=')), 200)
  t.equal(await post({ ...ask('1+1='), note: 'x'.repeat(1000) }), 413)
  t.equal(await post({ ...ask('1+1='), sampling_params: { temperature: -1 } }), 400)
  t.not((await gateway.post('/workers', { url: 7 })).status, 200)
  const [ofEngine, ofGateway] = await texts()
  t.match(ofEngine, refused('requests_refused_total', 'BODY_TOO_LARGE', 1))
  t.match(ofEngine, refused('requests_refused_total', 'INVALID_REQUEST', 1))
  t.match(ofGateway, refused('gateway_requests_refused_total', 'BODY_TOO_LARGE', 0), 'the engine refused it')
  t.match(ofGateway, refused('gateway_requests_refused_total', 'INVALID_REQUEST', 1))
})
