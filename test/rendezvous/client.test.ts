import t from 'tap'
import { StoreClient } from '../../src/rendezvous/client.ts'
import { PrefixStore } from '../../src/rendezvous/prefix-store.ts'
import { StoreServer } from '../../src/rendezvous/server.ts'
import { eventually, failureOf } from '../helpers/eventually.ts'
import { nothingOpen, tcpScript, until } from '../helpers/tcp-script.ts'

const host = '127.0.0.1'
const limits = { timeoutMs: 60_000 }
/** VALIDATE and CHECK of init/. */
const HELLO = 5 + 22
const READY = Buffer.of(0)
const id = Buffer.from(Array.from({ length: 128 }, (_, i) => 3 * i % 256))

t.test('the bytes of a session equal a recording of torch', async t => {
  const script = await tcpScript(t, (socket, bytes) => {
    if (bytes.length === HELLO) socket.write(READY)
    if (bytes.length === HELLO + 22) socket.write(Buffer.from('0200000000000000', 'hex'))
    if (bytes.length === 5 + 34) socket.write(READY)
    if (bytes.length === 5 + 34 + 26) socket.write(Buffer.concat([Buffer.from('8000000000000000', 'hex'), id]))
  })
  const client = await StoreClient.connect({ host, port: script.port, ...limits })
  t.equal(await client.countWorkers(1), 2)
  t.strictSame(await client.get('grp/grp//cuda//0'), id)
  client.close()
  t.equal(
    Buffer.concat(script.received).toString('hex'),
    [
      '00cef7853c',
      '0501000000000000000500000000000000696e69742f',
      '040500000000000000696e69742f0100000000000000',
      '00cef7853c',
      '06010000000000000011000000000000002f6772702f6772702f2f637564612f2f30',
      '0311000000000000002f6772702f6772702f2f637564612f2f30'
    ]
      .join('')
  )
  t.equal(script.count, 2, 'a wait has a connection of its own')
})

t.test('a wait for several keys ends when the last one is there, whichever comes last', async t => {
  const server = await StoreServer.listen({ host, port: 0 })
  const [client, other] = [
    await StoreClient.connect({ host, port: server.address.port, ...limits }),
    await StoreClient.connect({ host, port: server.address.port, ...limits })
  ]
  for (const [round, order] of [[0, 1, 2], [2, 1, 0], [1, 2, 0]].entries()) {
    const keys = [0, 1, 2].map(key => `${round}/${key}`)
    let ended = 0
    const waits = [client.wait(keys), client.multiGet(keys)]
    for (const wait of waits) {
      void wait.then(() => {
        ended++
      })
    }
    for (const key of order) {
      // After a reply to a later request, the reply to a wait that is over would be there, too.
      for (let i = 0; i < 3; i++) await Promise.all([other.numKeys(), client.numKeys()])
      t.equal(ended, 0, `before key ${key} of ${keys.join()}`)
      t.notOk(await client.check(keys), 'a check asks for all of them, too')
      await other.set(keys[key]!, `value ${key}`)
    }
    const [, values] = await Promise.all(waits)
    t.same(values!.map(String), ['value 0', 'value 1', 'value 2'])
    t.ok(await client.check(keys))
  }
  await t.rejects(client.wait(['0/0', 'never'], { timeoutMs: 30 }), { code: 'DEADLINE' })
  await t.rejects(client.wait(['never', '0/0'], { timeoutMs: 30 }), { code: 'DEADLINE' })
  await t.rejects(client.multiGet(['0/0', 'never'], { timeoutMs: 30 }), { code: 'DEADLINE' })
  client.close()
  other.close()
  await server.close()
})

t.test('every request is written in one piece, because the server reads on one thread for all clients', async t => {
  const script = await tcpScript(t, (socket, bytes) => {
    if (bytes.length === HELLO || bytes.length > 100_000) socket.write(READY)
  })
  const client = await StoreClient.connect({ host, port: script.port, ...limits })
  await client.set('k', Buffer.alloc(100_000))
  client.close()
  const sent = Buffer.concat(script.received).subarray(HELLO)
  t.equal(sent.length, 1 + 10 + 8 + 100_000 + 1 + 8 + 10)
  t.equal(sent[0], 1)
})

t.test('connecting retries until the server listens, and ignores connections that close at once', async t => {
  const probe = await StoreServer.listen({ host, port: 0 })
  const { port } = probe.address
  await probe.close()
  const connecting = StoreClient.connect({ host, port, ...limits })
  const server = await StoreServer.listen({ host, port })
  const client = await connecting
  await client.set('k', 'v')
  client.close()
  await server.close()
  // A proxy accepts connections before its server listens.
  const script = await tcpScript(t, socket => {
    socket.write(READY)
  }, (socket, connection) => {
    if (connection < 3) socket.destroy()
  })
  const late = await StoreClient.connect({ host, port: script.port, ...limits })
  t.equal(script.count, 4)
  late.close()
})

t.test('the other addresses of a name are tried too', async t => {
  const server = await StoreServer.listen({ host, port: 0 })
  t.teardown(async () => {
    await server.close()
  })
  const client = await StoreClient.connect({
    host: '127.0.0.9',
    port: server.address.port,
    alternatives: [host],
    ...limits
  })
  t.equal(client.where, `${host}:${server.address.port}`)
  client.close()
})

t.test('a deadline names the attempts, an abort has its reason, neither leaves a socket or a timer', async t => {
  const probe = await StoreServer.listen({ host, port: 0 })
  const { port } = probe.address
  await probe.close()
  const silent = await tcpScript(t, () => {})
  // On a machine that halts, the deadline may pass before the first refusal arrives.
  t.match(
    await eventually(
      async () => await failureOf(StoreClient.connect({ host, port }, { timeoutMs: 60 })),
      error => /ECONNREFUSED/.test(error!.message)
    ),
    {
      code: 'DEADLINE',
      message: new RegExp(
        `^the time was up after \\d+\\.\\d s: no TCPStore at 127\\.0\\.0\\.1:${port}, in \\d+ tr(?:y|ies) ` +
          "\\(.*ECONNREFUSED.*\\): is the trainer's rank 0 there"
      )
    }
  )
  await t.rejects(StoreClient.connect({ host, port: silent.port }, { timeoutMs: 60 }), {
    code: 'DEADLINE',
    message: /in \d+ tr(?:y|ies) \(no answer\)/
  })
  for (const port2 of [port, silent.port]) {
    const stop = new AbortController()
    const connecting = StoreClient.connect({ host, port: port2 }, { timeoutMs: 60_000, signal: stop.signal })
    setTimeout(() => {
      stop.abort(new Error('destroyed'))
    }, 30)
    await t.rejects(connecting, { message: 'destroyed' })
    await t.rejects(StoreClient.connect({ host, port: port2 }, { timeoutMs: 60_000, signal: stop.signal }), {
      message: 'destroyed'
    }, 'aborted before')
  }
  await until(() => silent.open.size === 0)
  await nothingOpen()
})

t.test('a server that is no TCPStore is reported at once', async t => {
  const http = await tcpScript(t, socket => {
    socket.write('HTTP/1.1 400 Bad Request\r\n\r\n')
  })
  await t.rejects(StoreClient.connect({ host, port: http.port, ...limits }), {
    code: 'STORE_PROTOCOL',
    message: /is no TCPStore of torch 2\.1 or later/
  })
  const talker = await tcpScript(t, socket => {
    socket.write(Buffer.alloc(2))
  })
  const client = await StoreClient.connect({ host, port: talker.port, ...limits })
  await until(() => talker.open.size === 0)
  client.close()
  await until(() => http.open.size === 0)
  await nothingOpen()
})

/** A server that answers the handshake and does `act` on the first request after it. */
const hostile = async (
  t: Parameters<typeof tcpScript>[0],
  act: (reply: (bytes: Buffer) => void, close: () => void) => void
): ReturnType<typeof tcpScript> =>
  await tcpScript(t, (socket, bytes) => {
    if (bytes.length === HELLO) socket.write(READY)
    else if (bytes.length > HELLO || bytes[5] === 6) {
      act(reply => {
        socket.write(reply)
      }, () => {
        socket.destroy()
      })
    }
  })

t.test('a broken reply, a wrong length or garbage from the server fails the call, not the client', async t => {
  const huge = Buffer.alloc(8, 0xff)
  const compare = async (client: StoreClient): Promise<unknown> => await client.compareSet('k', 'a', 'b')
  const wait = async (client: StoreClient): Promise<unknown> => await client.get('k')
  for (
    const [what, code, act, call] of [
      ['closed', 'STORE_UNREACHABLE', (_: unknown, close: () => void) => {
        close()
      }, wait],
      ['closed in mid-reply', 'STORE_UNREACHABLE', (reply: (bytes: Buffer) => void, close: () => void) => {
        reply(Buffer.of(8, 0))
        setTimeout(close, 5)
      }, compare],
      ['closed in mid-value', 'STORE_UNREACHABLE', (reply: (bytes: Buffer) => void, close: () => void) => {
        reply(Buffer.of(8, 0, 0, 0, 0, 0, 0, 0, 1))
        setTimeout(close, 5)
      }, compare],
      ['a huge length', 'STORE_PROTOCOL', (reply: (bytes: Buffer) => void) => {
        reply(huge)
      }, compare],
      ['more than was asked for', 'STORE_PROTOCOL', (reply: (bytes: Buffer) => void) => {
        reply(Buffer.alloc(9))
      }, wait],
      ['nonsense', 'STORE_PROTOCOL', (reply: (bytes: Buffer) => void) => {
        reply(Buffer.of(0x47))
      }, wait]
    ] as const
  ) {
    const script = await hostile(t, act)
    const client = await StoreClient.connect({ host, port: script.port, ...limits })
    await t.rejects(call(client), { code }, what)
    await t.rejects(call(client), { code }, `${what}, again`)
    client.close()
    await until(() => script.open.size === 0)
  }
  await nothingOpen()
})

t.test('without replies each call ends at its own deadline, and a wait is cancelled first', async t => {
  const script = await hostile(t, () => {})
  const client = await StoreClient.connect({ host, port: script.port, ...limits })
  const stop = new AbortController()
  const patient = client.add('n', 1, { timeoutMs: 60_000, signal: stop.signal })
  await t.rejects(client.check(['k'], { timeoutMs: 20 }), {
    code: 'DEADLINE',
    message: /looking for "k" in the store at/
  })
  await t.rejects(
    client.check(['k'], { timeoutMs: 20 }),
    { code: 'DEADLINE' },
    'on a connection without a pending reply'
  )
  await until(() => script.count >= 2)
  t.equal(script.count, 2)
  const last = await eventually(async () => {
    await t.rejects(client.wait(['k'], { timeoutMs: 20 }), { code: 'DEADLINE', message: /waiting for "k"/ })
    return Buffer.concat(script.received).at(-1)
  }, last => last === 12)
  t.equal(last, 12, 'CANCEL_WAIT')
  // Only the call whose deadline has not passed keeps a connection.
  await until(() => script.open.size === 1)
  stop.abort(new Error('stop'))
  await t.rejects(patient, { message: 'stop' })
  await until(() => script.open.size === 0)
  await nothingOpen()
})

t.test('replies that arrive byte by byte or late are read, and a broken shared connection is opened again', async t => {
  const server = await StoreServer.listen({ host, port: 0 })
  const { port } = server.address
  const client = await StoreClient.connect({ host, port, ...limits })
  t.teardown(() => {
    client.close()
  })
  await client.set('k', 'v')
  await server.close()
  await t.rejects(client.add('n', 1), { code: 'STORE_UNREACHABLE' })
  const again = await StoreServer.listen({ host, port })
  t.teardown(async () => {
    await again.close()
  })
  t.equal(await client.add('n', 1), 1)
  const slow = await tcpScript(t, (socket, bytes) => {
    if (bytes.length === HELLO) socket.write(READY)
    if (bytes.length <= HELLO + 1) return
    const reply = Buffer.from('2a00000000000000', 'hex')
    for (let i = 0; i < 8; i++) {
      setTimeout(() => {
        socket.write(reply.subarray(i, i + 1))
      }, 2 * i)
    }
  })
  const other = await StoreClient.connect({ host, port: slow.port, ...limits })
  t.equal(await other.add('n', 1), 42)
  other.close()
})

t.test('a wait whose key appears while it is cancelled succeeds', async t => {
  const script = await tcpScript(t, (socket, bytes) => {
    if (bytes.length === HELLO) socket.write(READY)
    if (bytes.at(-1) === 12) socket.write(Buffer.of(0, 1))
  })
  const client = await StoreClient.connect({ host, port: script.port, ...limits })
  // The reply must come within a short time, in which a machine may halt.
  t.equal(
    await eventually(async () => await failureOf(client.wait(['k'], { timeoutMs: 20 })), error => error === null),
    null
  )
  client.close()
})

t.test('an old server without PING and LIST_KEYS is no failure', async t => {
  const old = await tcpScript(t, (socket, bytes) => {
    if (bytes.length === HELLO) socket.write(READY)
    if (bytes.length > HELLO) socket.destroy()
  })
  const client = await StoreClient.connect({ host, port: old.port, ...limits })
  t.equal(await client.ping(), false)
  t.equal(await client.listKeys(), undefined)
  client.close()
  await t.rejects(client.ping(), { code: 'STORE_UNREACHABLE', message: /has left the store/ })
})

t.test('closing ends running calls, and prefixes nest as in torch', async t => {
  const server = await StoreServer.listen({ host, port: 0 })
  const client = await server.connect(limits)
  const inner = new PrefixStore('cuda/', new PrefixStore('G/', new PrefixStore('G', client)))
  await inner.set('0', 'x')
  t.same(await client.listKeys(), ['/G/G//cuda//0'])
  t.equal(inner.where, client.where)
  t.equal(await inner.check(['0']), true)
  t.equal((await inner.multiGet(['0']))[0]!.toString(), 'x')
  t.equal((await inner.compareSet('0', 'x', 'y')).toString(), 'y')
  t.equal(await inner.add('n', 2), 2)
  t.equal(await inner.deleteKey('n'), true)
  const waiting = inner.wait(['never'])
  const ended = t.rejects(waiting, { code: 'STORE_UNREACHABLE', message: /has left the store/ })
  client.close()
  await ended
  await server.close()
  await nothingOpen()
})
