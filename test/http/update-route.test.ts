import Fastify from 'fastify'
import type { RouteOptions } from 'fastify'
import t from 'tap'
import refit from '../../src/app/plugin.ts'
import { FakeEngine } from '../helpers/fake-engine.ts'
import { call, routeApp } from '../helpers/route-app.ts'

/** Every route that can change weights. A new one belongs in this list. */
const CHANGE_WEIGHTS = [
  'GET /weights_checker',
  'POST /areal_update_weights',
  'POST /areal_update_weights_tensor',
  'POST /areal_update_weights_xccl',
  'POST /collective_rpc',
  'POST /engine/update_weights_from_distributed',
  'POST /nemo-rl/refit/flush',
  'POST /update_named_param',
  'POST /update_named_param/',
  'POST /update_weights',
  'POST /update_weights_from_disk',
  'POST /update_weights_from_distributed',
  'POST /update_weights_from_ipc',
  'POST /update_weights_from_peer',
  'POST /update_weights_from_shards',
  'POST /update_weights_from_tensor',
  'POST /update_weights_skyrl',
  'POST /weight_checker',
  'POST /weights_checker'
]

/** Routes whose schema takes any body: they take nothing from it. */
const TAKE_NO_BODY = ['/areal_update_weights_xccl', '/nemo-rl/refit/flush']

/** All routes of a server with all dialects: method and path -> their options. */
async function allRoutes (): Promise<Map<string, RouteOptions>> {
  const app = Fastify()
  const routes = new Map<string, RouteOptions>()
  app.addHook('onRoute', route => {
    for (const method of [route.method].flat()) if (method !== 'HEAD') routes.set(`${method} ${route.url}`, route)
  })
  await app.register(refit, { engine: new FakeEngine(), tokenizer: null })
  await app.ready()
  await app.close()
  return routes
}

t.test('every POST route of the weights declares whether it changes them', async t => {
  const routes = await allRoutes()
  const changing: string[] = []
  for (const [name, { config, schema, method }] of routes) {
    if (config?.changesWeights === true) changing.push(name)
    const tags = (schema as { tags?: string[] } | undefined)?.tags ?? []
    if (method === 'POST' && tags.includes('weights')) t.type(config?.changesWeights, 'boolean', name)
  }
  t.same(changing.sort(), CHANGE_WEIGHTS)
})

t.test('every route that changes weights refuses a caller without the admin key', async t => {
  const { url, engine } = await routeApp(t, { apiKey: 'api', adminApiKey: 'admin' })
  const before = stateOf(engine)
  for (const name of CHANGE_WEIGHTS) {
    const [method, path] = name.split(' ') as [string, string]
    for (const key of [undefined, 'api', 'wrong']) {
      const headers = new Headers(key === undefined ? {} : { authorization: `Bearer ${key}` })
      const { status } = await call(url + path, undefined, { method, headers })
      t.ok([401, 403].includes(status), `${name} with ${key ?? 'no key'}`)
    }
  }
  t.same(stateOf(engine), before, 'nothing has changed')
})

t.test('every route that changes weights refuses an invalid body, and nothing changes', async t => {
  const { url, engine } = await routeApp(t, { adminApiKey: 'admin' })
  const before = stateOf(engine)
  for (const name of CHANGE_WEIGHTS) {
    const [method, path] = name.split(' ') as [string, string]
    if (method === 'GET') continue
    const headers = { authorization: 'Bearer admin', 'content-type': 'application/json' }
    const post = async (body: string) => await call(url + path, undefined, { method, headers, body })
    for (const body of ['{"torn', '"text"', '[1]', 'null']) {
      if (TAKE_NO_BODY.includes(path) && body !== '{"torn') continue
      const { status, text } = await post(body)
      t.equal(status, 400, `${name} ${body}: ${text.slice(0, 200)}`)
      t.match(text, /body/, name)
    }
    t.same(stateOf(engine), before, `${name} has changed nothing`)
  }
})

t.test('an invalid body of an update leaves its transaction with tensors pending', async t => {
  const { url, engine } = await routeApp(t)
  const pending: Array<string | null> = []
  engine.transactions.refused = id => {
    pending.push(id)
  }
  for (const name of CHANGE_WEIGHTS) {
    const [method, path] = name.split(' ') as [string, string]
    if (method === 'GET' || path.includes('checker') || TAKE_NO_BODY.includes(path)) continue
    pending.length = 0
    t.equal((await call(url + path, [1])).status, 400, name)
    t.same(pending, [null], name)
  }
  await call(`${url}/update_weights_from_disk`, { model_path: 1, transaction: 'mine' })
  t.same(pending.at(-1), 'mine')
})

function stateOf (engine: FakeEngine): object {
  const { epoch, weightVersion, weights, calls } = engine
  return { epoch, weightVersion, weights, calls: [...calls], values: structuredClone([...engine.values]) }
}
