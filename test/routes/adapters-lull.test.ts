import t from 'tap'
import { FakeEngine } from '../helpers/fake-engine.ts'
import { call, routeApp } from '../helpers/route-app.ts'

/** Bodies that each route refuses as soon as it has read them. */
const ROUTES = [
  '/load_lora_adapter',
  '/unload_lora_adapter',
  '/load_lora_adapter_from_tensors',
  '/load_lora_adapter_from_distributed',
  '/load_lora_adapter_from_ipc',
  '/v1/load_lora_adapter',
  '/v1/unload_lora_adapter',
  '/skyrl/v1/load_lora_adapter',
  '/areal_update_weights_lora',
  '/areal_update_weights_lora_xccl',
  '/adapters/actor'
]

t.test('the body of a request for an adapter is read when tokens have just been delivered', async t => {
  const engine = new FakeEngine({ adapters: true })
  const waiting: (() => void)[] = []
  const lull = async (): Promise<void> => {
    await new Promise<void>(resolve => {
      waiting.push(resolve)
    })
  }
  Object.assign(engine, { lull })
  const { url } = await routeApp(t, { engine })
  for (const route of ROUTES) {
    const answers: number[] = []
    const answer = call(url + route, { lora_name: 5 }).then(({ status }) => {
      answers.push(status)
    })
    while (waiting.length + answers.length === 0) await new Promise(resolve => setImmediate(resolve))
    t.same(answers, [], `${route} waits`)
    waiting.pop()?.()
    await answer
    t.same(answers, [400], route)
    t.same(waiting, [], 'it waits once')
  }
})
