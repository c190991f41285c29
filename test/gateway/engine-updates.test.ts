import { join } from 'node:path'
import t from 'tap'
import { engineServer, gatewayTo, modelFolder } from '../helpers/gateway.ts'

t.test('a gateway joins the updates of its engines, and finds the trace of each', async t => {
  const folder = modelFolder(t)
  const engines = [await engineServer(t, folder), await engineServer(t, folder)]
  const gateway = await gatewayTo(t, engines.map(({ url }) => url))
  await gateway.post('/update_weights_from_disk', { model_path: join(folder, 'adder'), weight_version: 'step-1' })
  const { status, body } = await gateway.get('/updates')
  t.equal(status, 200)
  t.same(body.errors, [])
  t.same(body.updates.map(({ engine }: { engine: string }) => engine).sort(), engines.map(({ url }) => url).sort())
  for (const update of body.updates) {
    t.match(update, { route: '/update_weights_from_disk', label_after: 'step-1', outcome: 'done' })
    const trace = await gateway.get(`/updates/${update.id}/trace.json`)
    t.match(trace, { status: 200, body: { otherData: { update: update.id } } })
  }
  t.equal((await gateway.get('/updates/none/trace.json')).status, 404)
})

t.test('an engine that does not answer is named, and the others are listed', async t => {
  const folder = modelFolder(t)
  const engines = [await engineServer(t, folder), await engineServer(t, folder)]
  const gateway = await gatewayTo(t, engines.map(({ url }) => url), { healthMs: 3_600_000 })
  await gateway.post('/update_weights_from_disk', { model_path: join(folder, 'adder') })
  await engines[0]!.kill()
  const { body } = await gateway.get('/updates')
  t.match(body, { updates: [{ engine: engines[1]!.url }], errors: [{ engine: engines[0]!.url }] })
})
