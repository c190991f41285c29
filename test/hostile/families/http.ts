import type { Random } from '../lib/random.ts'
import { RawClient, rawPost } from '../lib/raw.ts'
import type { Target } from '../lib/target.ts'
import type { Family, World } from '../lib/world.ts'

/** A request that a smuggler hides. If it ran, the label of the weights would change. */
const HIDDEN = rawPost('/update_weight_version', '{"new_version":"smuggled"}')
const HEALTH = 'GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n'
const QUESTION = '{"text":"1+1=","sampling_params":{"max_new_tokens":2,"temperature":0}}'
const QUIET_MS = 400

/** Malformed HTTP: smuggling, bad chunks, half-sent heads and bodies, pipelines. */
export const http: Family = {
  name: 'http',
  attack: async (world, random) => {
    for (const target of [world.open, world.gateway]) {
      await Promise.all([
        ...smuggled().map(async ([name, bytes]) => await smuggle(world, target, name, bytes)),
        ...malformed(random).map(async ([name, bytes]) => await send(world, target, name, bytes)),
        pipeline(world, target),
        halfSent(world, target, random)
      ])
      await damage(world, target, random)
    }
  }
}

const post = (...headers: string[]): string =>
  ['POST /generate HTTP/1.1', 'host: localhost', 'content-type: application/json', ...headers, '', ''].join('\r\n')

/** Requests whose end is read differently by different readers, with HIDDEN behind one of the ends. */
function smuggled (): [name: string, bytes: string][] {
  const chunked = `0\r\n\r\n${HIDDEN}`
  const both = (te: string): string => `${post(`content-length: ${chunked.length}`, te)}${chunked}`
  const length = HIDDEN.length
  return [
    ['length and chunks', both('transfer-encoding: chunked')],
    ['chunks with a tab', both('transfer-encoding:\tchunked')],
    ['chunks with a space before the colon', both('transfer-encoding : chunked')],
    ['chunks with a vertical tab', both('transfer-encoding: \x0bchunked')],
    ['chunks in a folded line', both('transfer-encoding:\r\n chunked')],
    ['xchunked', both('transfer-encoding: xchunked')],
    ['chunked, identity', both('transfer-encoding: chunked, identity')],
    ['chunked twice', both('transfer-encoding: chunked\r\ntransfer-encoding: chunked')],
    ['chunks hidden by a line feed', both('x: y\ntransfer-encoding: chunked')],
    ['chunks hidden by a return', both('x: y\rtransfer-encoding: chunked')],
    ['two lengths', `${post('content-length: 0', `content-length: ${length}`)}${HIDDEN}`],
    ['a list of lengths', `${post(`content-length: 0, ${length}`)}${HIDDEN}`],
    ['a length with a sign', `${post('content-length: +0')}${HIDDEN}`],
    ['a negative length', `${post('content-length: -1')}${HIDDEN}`],
    ['a length in hex', `${post('content-length: 0x0')}${HIDDEN}`],
    ['a length beyond 2^64', `${post('content-length: 18446744073709551616')}${HIDDEN}`],
    ['a chunk size beyond 2^64', `${post('transfer-encoding: chunked')}10000000000000000\r\n\r\n0\r\n\r\n${HIDDEN}`],
    ['a chunk size with a sign', `${post('transfer-encoding: chunked')}-1\r\n\r\n${HIDDEN}`],
    ['a chunk size with 0x', `${post('transfer-encoding: chunked')}0x0\r\n\r\n${HIDDEN}`],
    ['a chunk that is longer than its size', `${post('transfer-encoding: chunked')}1\r\n{}x\r\n0\r\n\r\n${HIDDEN}`],
    ['a chunk extension with a line feed', `${post('transfer-encoding: chunked')}0;\n\r\n\r\n${HIDDEN}`],
    ['a GET with a body', `GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: ${length}\r\n\r\n${HIDDEN}`],
    ['a header with a NUL', `${post('x: \0', 'content-length: 0')}${HIDDEN}`]
  ]
}

/** The hidden request may be refused, or be read as the body. It never runs behind a request that is malformed. */
async function smuggle (world: World, target: Target, name: string, bytes: string): Promise<void> {
  const client = await RawClient.open(target.port)
  client.send(bytes)
  await client.replies(3, QUIET_MS)
  client.end()
  const { text } = await world.open.call('/weight_version')
  world.check('no smuggled request runs', !text.includes('smuggled'), () => `${target.name}, ${name}: ${text}`)
  const { statuses } = client
  const isGood = statuses.length <= 1 && statuses.every(status => status < 500)
  world.check(
    'a request with two ends gets at most one reply, below 500',
    isGood,
    () => `${target.name}, ${name}: ${statuses.join(' ')}\n${client.text.slice(0, 500)}`
  )
}

function malformed (random: Random): [name: string, bytes: string][] {
  const head = (lines: string[]): string => [...lines, '', ''].join('\r\n')
  return [
    ['bytes', random.bytes(500).toString('latin1') + '\r\n\r\n'],
    ['TLS', '\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03' + random.bytes(200).toString('latin1')],
    ['HTTP/2', 'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n'],
    ['HTTP/0.9', 'GET /health\r\n\r\n'],
    ['HTTP/9.9', head(['GET /health HTTP/9.9', 'host: localhost'])],
    ['no host', head(['GET /model_info HTTP/1.1'])],
    ['two hosts', head(['GET /model_info HTTP/1.1', 'host: localhost', 'host: evil.example'])],
    ['a host with a user', head(['GET /model_info HTTP/1.1', 'host: localhost@evil.example'])],
    ['an unknown method', head(['HURT /generate HTTP/1.1', 'host: localhost'])],
    ['CONNECT', head(['CONNECT evil.example:443 HTTP/1.1', 'host: evil.example:443'])],
    ['TRACE', head(['TRACE / HTTP/1.1', 'host: localhost', 'x-secret: 1'])],
    ['a long path', head([`GET /${'a'.repeat(100_000)} HTTP/1.1`, 'host: localhost'])],
    ['a long header', head(['GET /health HTTP/1.1', 'host: localhost', `x: ${'a'.repeat(100_000)}`])],
    ['many headers', head(['GET /model_info HTTP/1.1', ...Array.from({ length: 3000 }, (_, i) => `x${i}: y`)])],
    ['a bad percent', head(['GET /v1/models/%zz%c0%ae HTTP/1.1', 'host: localhost'])],
    ['a path of dots', head([`GET /${'../'.repeat(200)}etc/passwd HTTP/1.1`, 'host: localhost'])],
    [
      'another type',
      head(['POST /generate HTTP/1.1', 'host: localhost', 'content-type: text/x; charset=\xff', 'content-length: 2']) +
      '{}'
    ],
    [
      'an encoded body',
      head([
        'POST /generate HTTP/1.1',
        'host: localhost',
        'content-type: application/json',
        'content-encoding: gzip',
        'content-length: 2'
      ]) + '{}'
    ],
    ['no length', post() + QUESTION],
    [
      'a websocket',
      head([
        'GET /health HTTP/1.1',
        'host: localhost',
        'connection: upgrade',
        'upgrade: websocket',
        'sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==',
        'sec-websocket-version: 13'
      ])
    ],
    [
      'h2c',
      head([
        'GET /health HTTP/1.1',
        'host: localhost',
        'connection: upgrade, http2-settings',
        'upgrade: h2c',
        'http2-settings: AAMAAABkAAQAAP__'
      ])
    ],
    [
      'another expectation',
      head(['POST /generate HTTP/1.1', 'host: localhost', 'expect: money', 'content-length: 2']) + '{}'
    ],
    [
      'trailers',
      post('transfer-encoding: chunked', 'trailer: host') + '2\r\n{}\r\n0\r\nhost: evil.example\r\n' +
      'content-length: 5\r\n\r\n'
    ]
  ]
}

async function send (world: World, target: Target, name: string, bytes: string): Promise<void> {
  const client = await RawClient.open(target.port)
  client.send(bytes)
  await client.replies(1, QUIET_MS)
  const { statuses } = client
  client.end()
  world.check(
    'malformed requests get no 500',
    statuses.every(status => status < 500),
    () => `${target.name}, ${name}: ${client.text.slice(0, 500)}`
  )
}

/** Many requests in one packet get their replies in order. */
async function pipeline (world: World, target: Target): Promise<void> {
  const client = await RawClient.open(target.port)
  const wrong = rawPost('/generate', '{"text":1}')
  const count = 20
  client.send(Array.from({ length: count }, () => HEALTH + wrong + rawPost('/generate', QUESTION)).join(''))
  const statuses = await client.replies(3 * count, 60_000)
  client.end()
  const expected = Array.from({ length: count }, () => [200, 400, 200]).flat()
  world.check(
    'pipelined requests get their replies in order',
    statuses.join() === expected.join(),
    () => `${target.name}: ${statuses.join(' ')}`
  )
}

/** Clients that stop in the middle, hold connections, or reset them. Others are served meanwhile. */
async function halfSent (world: World, target: Target, random: Random): Promise<void> {
  const whole = rawPost('/generate', QUESTION)
  const clients = await Promise.all(Array.from({ length: 30 }, async () => await RawClient.open(target.port)))
  for (const client of clients) client.send(whole.slice(0, random.below(whole.length)))
  const reply = await target.call('/generate', { body: JSON.parse(QUESTION) })
  world.check(
    'half-sent requests shut nobody out',
    reply.status === 200,
    () => `${target.name}: ${reply.status} ${reply.text}`
  )
  for (const client of clients) {
    if (random.below(2) === 0) client.socket.resetAndDestroy()
    else client.end()
  }
}

/** Requests with a few bytes changed. */
async function damage (world: World, target: Target, random: Random): Promise<void> {
  for (let i = 0; i < 60; i++) {
    const bytes = random.damaged(Buffer.from(rawPost('/generate', QUESTION), 'latin1'), 1 + random.below(4))
    const client = await RawClient.open(target.port)
    client.send(bytes)
    client.socket.end()
    await client.replies(1, QUIET_MS)
    client.end()
    world.check(
      'damaged requests get no 500',
      client.statuses.every(status => status < 500),
      () => `${target.name}: ${JSON.stringify(bytes.toString('latin1'))}: ${client.text.slice(0, 500)}`
    )
  }
}
