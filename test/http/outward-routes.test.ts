import Fastify from 'fastify'
import type { RouteOptions } from 'fastify'
import t from 'tap'
import refit from '../../src/app/plugin.ts'
import { FakeEngine } from '../helpers/fake-engine.ts'

// Refusals of calls to other addresses, sockets and files say what was found there. They are for admins: whoever may
// only generate must not be able to ask. These are the names of all fields that hold an address or a path.

const OUTWARD =
  /^(master_(addr|address|port)|host|port|ports|url|uri|zmq_handles|bucket|receiver_hosts|init_info|kwargs)$/
/** `lora_path` of a request that generates is the name of an adapter, which is loaded already. */
const PATHS = /^((?!lora)\w+_(path|dir|folder)|manifest)$/

interface Schema {
  properties?: Record<string, Schema>
  anyOf?: Schema[]
  items?: Schema
}

function fieldsOf (schema: Schema): string[] {
  const { properties = {}, anyOf = [], items } = schema
  return [
    ...Object.entries(properties).flatMap(([name, field]) => [name, ...fieldsOf(field)]),
    ...anyOf.flatMap(fieldsOf),
    ...items === undefined ? [] : fieldsOf(items)
  ]
}

t.test('only admins may name addresses, sockets and files', async t => {
  const app = Fastify()
  const routes: [route: string, level: unknown, fields: string[]][] = []
  app.addHook('onRoute', ({ method, url, config, schema }: RouteOptions) => {
    const fields = [schema?.body, schema?.querystring].flatMap(part =>
      part === undefined ? [] : fieldsOf(part as Schema)
    )
    const outward = fields.filter(name => OUTWARD.test(name) || PATHS.test(name))
    if (outward.length > 0) routes.push([`${String(method)} ${url}`, config?.auth, outward])
  })
  const engine = new FakeEngine()
  await app.register(refit, { engine, tokenizer: null })
  await app.ready()
  t.ok(routes.length >= 15, `${routes.length} routes name others`)
  for (const name of ['/update_weights_from_disk', '/update_weights_from_ipc', '/init_weights_update_group']) {
    t.ok(routes.some(([route]) => route === `POST ${name}`), name)
  }
  for (const [route, level, fields] of routes) t.equal(level, 'admin', `${route}: ${fields.join(', ')}`)
  await app.close()
  await engine.close()
})
