import t from 'tap'
import { RemoteEngine } from '../../src/remote/remote-engine.ts'
import { hangs, says, scriptedEngine } from '../helpers/scripted-engine.ts'

t.test(
  'an engine that stops replying is not ready, and its health checks do not accumulate connections',
  { timeout: 20_000 },
  async t => {
    const far = await scriptedEngine(t)
    const engine = await RemoteEngine.connect(far.url, { pollMs: 10 })
    t.teardown(async () => {
      await engine.close()
    })
    t.ok(engine.ready)
    for (const path of ['/server_info', '/model_info', '/health', '/v1/loads']) far.on[path] = hangs
    await new Promise(resolve => setTimeout(resolve, 1000))
    t.ok(await far.connections() < 8, `${await far.connections()} connections`)
    while (engine.ready) await new Promise(resolve => setTimeout(resolve, 20))
    Object.assign(far.on, {
      '/server_info': says({ tp_size: 1 }),
      '/model_info': says({ model_path: '/m' }),
      '/health': says({}),
      '/v1/loads': says({})
    })
    while (!engine.ready) await new Promise(resolve => setTimeout(resolve, 20))
  }
)

t.test('a label that a remote SGLang engine refuses is an error', async t => {
  const far = await scriptedEngine(t)
  const engine = await RemoteEngine.connect(far.url)
  t.teardown(async () => {
    await engine.close()
  })
  far.on['/update_weight_version'] = says({ success: false, message: 'not now' }, 400)
  const update = await engine.update({})
  await t.rejects(update.commit({ version: 'step-1' }), { message: /not now/ })
})
