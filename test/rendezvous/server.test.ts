import { connect } from 'node:net'
import type { Socket } from 'node:net'
import t from 'tap'
import type { Test } from 'tap'
import { StoreServer } from '../../src/rendezvous/server.ts'
import type { StoreServerOptions } from '../../src/rendezvous/server.ts'
import { encodeRequests, validate } from '../../src/wire/store/request.ts'
import type { StoreRequest } from '../../src/wire/store/request.ts'
import { nothingOpen, until } from '../helpers/tcp-script.ts'

const host = '127.0.0.1'
const limits = { timeoutMs: 60_000 }

interface Raw {
  socket: Socket
  received: () => Buffer
  closed: Promise<void>
  isClosed: () => boolean
  send: (...requests: StoreRequest[]) => void
}

async function serve (t: Test, options: Partial<StoreServerOptions> = {}): Promise<StoreServer> {
  const server = await StoreServer.listen({ host, port: 0, ...options })
  t.teardown(async () => {
    await server.close()
  })
  return server
}

function raw (t: Test, server: StoreServer, handshake = true): Raw {
  const socket = connect(server.address.port, host)
  let bytes = Buffer.alloc(0)
  let isClosed = false
  socket
    .on('data', chunk => {
      bytes = Buffer.concat([bytes, chunk])
    })
    .on('error', () => {})
  const closed = new Promise<void>(resolve => {
    socket.on('close', () => {
      isClosed = true
      resolve()
    })
  })
  t.teardown(() => {
    socket.destroy()
  })
  if (handshake) socket.write(encodeRequests(validate()))
  return {
    socket,
    received: () => bytes,
    closed,
    isClosed: () => isClosed,
    send: (...requests) => {
      socket.write(encodeRequests(...requests))
    }
  }
}

t.test('requests that arrive together or byte by byte are answered in order', async t => {
  const server = await serve(t)
  const requests: StoreRequest[] = [
    { op: 'SET', key: '/k', value: Buffer.from('v') },
    { op: 'GET', key: '/k' },
    { op: 'PING', nonce: 7 },
    { op: 'ADD', key: 'init/', delta: 2 },
    { op: 'GET', key: '/missing' },
    { op: 'MULTI_GET', keys: ['/missing', 'init/'] },
    { op: 'CHECK', keys: ['/missing'] },
    { op: 'CANCEL_WAIT' },
    { op: 'WAIT', keys: ['/k'] }
  ]
  const expected = [
    '0100000000000000' + '76',
    '07000000',
    '0200000000000000',
    '0000000000000000',
    '0000000000000000' + '0100000000000000' + '32',
    '01',
    '01',
    '00'
  ]
    .join('')
  const together = raw(t, server)
  together.send(...requests)
  await until(() => together.received().length >= expected.length / 2)
  t.equal(together.received().toString('hex'), expected)
  const slow = raw(t, server, false)
  slow.socket.setNoDelay(true)
  for (const byte of encodeRequests(validate(), ...requests)) {
    slow.socket.write(Buffer.of(byte))
    await new Promise(resolve => setImmediate(resolve))
  }
  await until(() => slow.received().length >= expected.length / 2)
  t.equal(
    slow.received().toString('hex'),
    expected.replace('0200000000000000', '0400000000000000').replace('010000000000000032', '010000000000000034')
  )
  t.equal(server.workers, 4)
})

t.test('an invalid request closes its connection and no other', async t => {
  const server = await serve(t)
  const good = raw(t, server)
  for (const bytes of ['00cef7853d', '01', '47455420', '0d07000000']) {
    const bad = raw(t, server, false)
    bad.socket.write(Buffer.from(bytes, 'hex'))
    await bad.closed
  }
  for (
    const bytes of [
      '0e',
      '12',
      'ff',
      '00cef7853c',
      '03ffffffffffffffff',
      '030120000000000000',
      '01010000000000000061010080000000000000',
      '060100020000000000'
    ]
  ) {
    const bad = raw(t, server)
    bad.socket.write(Buffer.from(bytes, 'hex'))
    await bad.closed
  }
  const text = raw(t, server)
  text.send({ op: 'SET', key: '/t', value: Buffer.from('text') }, { op: 'ADD', key: '/t', delta: 1 })
  await text.closed
  const impatient = raw(t, server)
  impatient.send({ op: 'WAIT', keys: ['/never'] }, { op: 'GET', key: '/k' })
  await impatient.closed
  good.send({ op: 'NUM_KEYS' })
  await until(() => good.received().length === 8)
  t.equal(good.received().readBigInt64LE(), 1n)
  t.equal(good.isClosed(), false)
})

t.test('keys, bytes and connections are bounded, and a deleted key makes room', async t => {
  const server = await serve(t, { maxKeys: 3, maxBytes: 3000, maxConnections: 3 })
  const client = raw(t, server)
  client.send({ op: 'MULTI_SET', pairs: [['/a', Buffer.alloc(1)], ['/b', Buffer.alloc(1)], ['/c', Buffer.alloc(1)]] }, {
    op: 'NUM_KEYS'
  })
  await until(() => client.received().length === 8)
  const fourth = raw(t, server)
  fourth.send({ op: 'SET', key: '/d', value: Buffer.alloc(1) })
  await fourth.closed
  client.send({ op: 'DELETE_KEY', key: '/a' }, { op: 'SET', key: '/d', value: Buffer.alloc(2000) })
  await until(() => client.received().length === 16)
  client.send({ op: 'SET', key: '/d', value: Buffer.alloc(2400) }, { op: 'NUM_KEYS' })
  await until(() => client.received().length === 24)
  for (let i = 1; i <= 3; i++) {
    client.send({ op: 'DELETE_KEY', key: '/d' }, { op: 'SET', key: '/d', value: Buffer.alloc(2400) }, {
      op: 'NUM_KEYS'
    })
    await until(() => client.received().length === 24 + 16 * i)
  }
  const big = raw(t, server)
  big.send({ op: 'APPEND', key: '/d', value: Buffer.alloc(600) })
  await big.closed
  const partial = raw(t, server)
  partial.socket.write(encodeRequests({ op: 'SET', key: '/b', value: Buffer.alloc(4000) }).subarray(0, 3500))
  await partial.closed
  const patient = raw(t, server)
  patient.send({ op: 'WAIT', keys: Array.from({ length: 100 }, (_, i) => `/${i}`) })
  await patient.closed
  client.send({ op: 'LIST_KEYS' })
  await until(() => client.received().length === 72 + 8 + 3 * 10)
  const more = [raw(t, server), raw(t, server)]
  more[1]!.send({ op: 'NUM_KEYS' })
  await until(() => more[1]!.received().length === 8)
  await raw(t, server).closed
  t.equal(client.isClosed(), false)
})

t.test('replies to a client that does not read are bounded', async t => {
  const server = await serve(t)
  const client = raw(t, server)
  client.send({ op: 'SET', key: '/k', value: Buffer.alloc(4 << 20) }, { op: 'CHECK', keys: ['/k'] })
  await until(() => client.received().length === 1)
  client.socket.pause()
  const before = process.memoryUsage().arrayBuffers
  client.send(...Array.from({ length: 200 }, (): StoreRequest => ({ op: 'GET', key: '/k' })))
  const other = raw(t, server)
  other.send({ op: 'NUM_KEYS' })
  await until(() => other.received().length === 8)
  t.ok(process.memoryUsage().arrayBuffers - before < 200 << 20, 'of 800 MiB')
  client.socket.destroy()
})

t.test('a wait ends when the last of its keys is set, by any operation, and with its connection', async t => {
  const server = await serve(t)
  const client = await server.connect(limits)
  t.teardown(() => {
    client.close()
  })
  const setters: Array<[StoreRequest, boolean]> = [
    [{ op: 'SET', key: '/b0', value: Buffer.of(1) }, true],
    [{ op: 'ADD', key: '/b1', delta: 1 }, true],
    [{
      op: 'APPEND',
      key: '/b2',
      value: Buffer.of(1)
    }, true],
    [{ op: 'COMPARE_SET', key: '/b3', expected: Buffer.alloc(0), desired: Buffer.of(1) }, true],
    [{ op: 'MULTI_SET', pairs: [['/b4', Buffer.of(1)]] }, true],
    [{
      op: 'COMPARE_SET',
      key: '/b5',
      expected: Buffer.of(9),
      desired: Buffer.of(1)
    }, false]
  ]
  const waiters = setters.map((_, i) => {
    const waiter = raw(t, server)
    waiter.send({ op: 'WAIT', keys: ['/a', `/b${i}`] })
    return waiter
  })
  const gone = raw(t, server)
  gone.send({ op: 'WAIT', keys: ['/a', '/b0'] })
  await until(() => server.waiting === waiters.length + 1)
  const setter = raw(t, server)
  setter.send({ op: 'SET', key: '/a', value: Buffer.of(1) }, { op: 'NUM_KEYS' })
  await until(() => setter.received().length === 8)
  gone.socket.destroy()
  await until(() => server.waiting === waiters.length)
  t.ok(waiters.every(waiter => waiter.received().length === 0))
  for (const [i, [request, wakes]] of setters.entries()) {
    setter.send(request)
    if (wakes) await until(() => waiters[i]!.received().length === 1)
  }
  await client.numKeys()
  t.equal(waiters.at(-1)!.received().length, 0)
  waiters.at(-1)!.send({ op: 'CANCEL_WAIT' }, { op: 'CHECK', keys: ['/a'] })
  await until(() => waiters.at(-1)!.received().length === 2)
  t.same([...waiters.at(-1)!.received()], [1, 0])
  t.equal(server.waiting, 0)
})

t.test('the wait for ranks ends with the last rank, the deadline, the signal or the server', async t => {
  const server = await serve(t)
  const all = server.waitForWorkers(3, limits)
  server.countWorkers(1)
  const client = await server.connect(limits)
  t.equal(await client.countWorkers(2), 3)
  await all
  await server.waitForWorkers(3, { timeoutMs: 0 })
  await t.rejects(server.waitForWorkers(4, { timeoutMs: 20 }), { code: 'DEADLINE', message: /3 of 4 ranks have come/ })
  const stop = new AbortController()
  const stopped = server.waitForWorkers(4, { timeoutMs: 60_000, signal: stop.signal })
  stop.abort(new Error('stop'))
  await t.rejects(stopped, { message: 'stop' })
  await t.rejects(server.waitForWorkers(4, { timeoutMs: 60_000, signal: stop.signal }), { message: 'stop' })
  const ended = t.rejects(server.waitForWorkers(4, { timeoutMs: 60_000 }), { code: 'STORE_UNREACHABLE' })
  client.close()
  await server.close()
  await ended
  await nothingOpen()
})

t.test('a port in use is a conflict, and the server listens on one interface alone', async t => {
  const server = await serve(t)
  await t.rejects(StoreServer.listen(server.address), {
    code: 'CONFLICT',
    message: /cannot listen on 127\.0\.0\.1:\d+ for a rendezvous: .*EADDRINUSE/
  })
  const other = await StoreServer.listen({ host: '127.0.0.2', port: server.address.port })
  await other.close()
  t.pass()
})
