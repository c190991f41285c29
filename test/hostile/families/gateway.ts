import { createServer } from 'node:http'
import type { IncomingMessage, RequestListener, ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import { setTimeout as sleep } from 'node:timers/promises'
import type { Random } from '../lib/random.ts'
import { Target } from '../lib/target.ts'
import type { Family, World } from '../lib/world.ts'

const SECRET = 'Bearer hostile-secret'
const INFO = { tp_size: 1, weight_version: 'default', started_at: 1, weights: 'current', model_path: '/m' }

interface Stranger {
  url: string
  /** All that it was sent. */
  got: string
  close: () => void
}

/** Engines that lie, never answer or never end, and addresses that are no engine. */
export const gateway: Family = {
  name: 'gateway',
  attack: async (world, random) => {
    await badAddresses(world, random)
    const strangers = await Promise.all(behaviours(random).map(async behave => await stranger(behave)))
    for (const { url } of strangers) await world.gateway.call('/workers', { body: { url } })
    await Promise.all(strangers.map(async (_, i) => await use(world, i)))
    await sleep(1500)
    await keysStay(world, strangers)
    await removeAll(world)
    for (const { close } of strangers) close()
    await closedGateway(world)
  }
}

async function badAddresses (world: World, random: Random): Promise<void> {
  const addresses = [
    '',
    'x',
    'ftp://127.0.0.1',
    'file:///etc/passwd',
    'http://',
    'http://127.0.0.1:99999',
    'unix:',
    'unix:/etc/passwd',
    'unix:../x',
    'javascript:1',
    'http://user:password@127.0.0.1:1',
    'http://127.0.0.1:1/#x',
    `http://${'a'.repeat(2000)}`,
    'http://127.0.0.1:1\r\nhost: x',
    'http://[::1',
    `http://127.0.0.1:${random.below(100)}`,
    world.gateway.url
  ]
  for (const url of addresses) {
    const { status, text } = await world.gateway.call('/workers', { body: { url } })
    world.check(
      'a bad address is refused, or is an engine that is down',
      status === 202 || (status >= 400 && status < 500),
      () => `${JSON.stringify(url.slice(0, 200))}: ${status} ${text.slice(0, 300)}`
    )
  }
}

/** The answers of strange engines. They tell who they are as a refit engine would. */
function behaviours (random: Random): RequestListener[] {
  const noise = random.bytes(3000)
  const asEngine = (rest: RequestListener): RequestListener => (request, reply) => {
    const info = request.url === '/capabilities' ? { server: 'refit' } : request.url === '/server_info' ? INFO : null
    if (info === null) rest(request, reply)
    else json(reply, info)
  }
  const endless = (reply: ServerResponse, bytes: Buffer): void => {
    const timer = setInterval(() => reply.write(bytes), 5)
    reply.on('close', () => clearInterval(timer)).on('error', () => {})
  }
  return [
    () => {},
    (request: IncomingMessage) => request.socket.destroy(),
    (_request, reply) => reply.end(noise),
    (_request, reply) => json(reply, []),
    (_request, reply) =>
      endless(reply.writeHead(200, { 'content-type': 'application/json' }), Buffer.alloc(1 << 16, ' ')),
    (request: IncomingMessage) => request.socket.end(Buffer.concat([Buffer.from('HTTP/1.1 200 OK\r\n'), noise])),
    asEngine(() => {}),
    asEngine((request: IncomingMessage) => request.socket.destroy()),
    asEngine((_request, reply) => endless(reply.writeHead(200), Buffer.alloc(1 << 16, ' '))),
    asEngine((_request, reply) => reply.writeHead(200, { 'content-length': '1000' }).end('{"a":')),
    asEngine((_request, reply) => reply.writeHead(500).end('<html>')),
    asEngine((_request, reply) => json(reply, { success: true, text: 1, output_ids: 'x', checksums: null })),
    asEngine((_request, reply) => json(reply, JSON.parse('{"__proto__":{"weight_version":"hurt"}}')))
  ]
}

function json (reply: ServerResponse, body: unknown): void {
  reply.writeHead(200, { 'content-type': 'application/json' }).end(JSON.stringify(body))
}

async function stranger (behave: RequestListener): Promise<Stranger> {
  const made: Stranger = { url: '', got: '', close: () => {} }
  const server = createServer((request, reply) => {
    made.got += JSON.stringify([request.url, request.headers])
    reply.on('error', () => {})
    request.on('error', () => {}).resume()
    behave(request, reply)
  })
  await new Promise<void>(resolve => server.listen(0, '127.0.0.1', resolve))
  made.url = `http://127.0.0.1:${(server.address() as AddressInfo).port}`
  made.close = () => {
    server.closeAllConnections()
    server.close()
  }
  return made
}

/** Users of the gateway meanwhile. A stranger may get one of their requests, and answer what it likes. */
async function use (world: World, number: number): Promise<void> {
  const headers = { authorization: SECRET }
  const body = { text: `${number}+1=`, sampling_params: { max_new_tokens: 2 } }
  const { status, text } = await world.gateway.call('/generate', { body, headers, timeoutMs: 3000 })
  world.check('a user behind strange engines gets no 500', status !== 500, () => `${status} ${text.slice(0, 300)}`)
  const health = await world.gateway.call('/health')
  world.check('/health of the gateway answers', health.status === 200, () => health.text)
}

/** An engine that was added without a key gets the keys of nobody. */
async function keysStay (world: World, strangers: readonly Stranger[]): Promise<void> {
  for (const { got } of strangers) {
    world.check('a strange engine is sent no key of a user', !got.includes('hostile-secret'), () => got.slice(0, 1000))
  }
}

/** Takes all but the real engine out again. */
async function removeAll (world: World): Promise<void> {
  const { workers } = JSON.parse((await world.gateway.call('/workers')).text) as {
    workers: { id: string, url: string }[]
  }
  for (const { id, url } of workers) {
    if (url === world.open.url) continue
    const { status, text } = await world.gateway.call(`/workers/${id}`, { method: 'DELETE', timeoutMs: 60_000 })
    world.check('a strange engine can be taken out', status >= 200 && status < 300, () => `${url}: ${status} ${text}`)
  }
}

/** A gateway that holds keys of engines and has none of its own takes no engine from clients. */
async function closedGateway (world: World): Promise<void> {
  const closed = await Target.start('gateway with keys', [
    'gateway',
    '--engine',
    world.open.url,
    '--engine-api-key',
    SECRET
  ])
  const spy = await stranger((_request, reply) => json(reply, { server: 'refit' }))
  for (const body of [{ url: spy.url }, { url: spy.url, api_key: 'own' }, { url: spy.url, admin_api_key: 'own' }]) {
    const { status, text } = await closed.call('/workers', { body })
    world.check('a gateway that holds keys takes no engine from clients', status === 403, () => `${status} ${text}`)
  }
  world.check('it sends nothing there', spy.got === '', () => spy.got)
  spy.close()
  await closed.stop()
}
