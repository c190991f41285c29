import { linkSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { createServer } from 'node:net'
import type { Socket } from 'node:net'
import { once } from 'node:events'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { chooseSlots } from '../../src/dialects/checkpoint-engine/checkpoint-engine.ts'
import { socketOf } from '../../src/dialects/checkpoint-engine/zmq-path.ts'
import { Replier } from '../../src/dialects/checkpoint-engine/zmq-rep.ts'
import { zmtpGreeting, zmtpMessage, zmtpReady, ZmtpReader } from '../../src/wire/trainers/zmtp.ts'

const UUIDS = [
  'GPU-11111111-1111-1111-1111-111111111111',
  'GPU-22222222-2222-2222-2222-222222222222',
  'GPU-33333333-3333-3333-3333-333333333333'
] as const
const card = (uuid: string): { ordinal: number, uuid: string, name: string, totalBytes: number } => ({
  ordinal: 0,
  uuid,
  name: 'H',
  totalBytes: 1
})
const never = new AbortController().signal

t.test('each GPU of the engine has its socket, which all ranks on it use; other sockets are ignored', async (t) => {
  const handles = Object.fromEntries(UUIDS.map((uuid, index) => [uuid, `ipc://@s${index}`]))
  t.match(chooseSlots({ gpus: [card(UUIDS[2]), card(UUIDS[0])], ranks: 2 }, handles), [{
    gpu: UUIDS[2],
    path: '\0s2',
    ranks: [0]
  }, { gpu: UUIDS[0], path: '\0s0', ranks: [1] }])
  t.match(chooseSlots({ gpus: [card(UUIDS[1]), card(UUIDS[1])], ranks: 2 }, handles), [{
    gpu: UUIDS[1],
    ranks: [0, 1]
  }])
  t.throws(() => chooseSlots({ gpus: [card(UUIDS[0]), card(UUIDS[1])], ranks: 2 }, { [UUIDS[0]]: 'ipc://@a' }), {
    code: 'INVALID_REQUEST',
    param: 'zmq_handles',
    message: /GPU of rank 1, GPU-2222.* among GPU-1111/
  })
})

t.test('an engine without GPUs uses one socket for all ranks, or one for each', async (t) => {
  t.match(chooseSlots({ gpus: [], ranks: 2 }, { cpu: 'ipc://@a' }), [{ gpu: null, ranks: [0, 1] }])
  t.match(chooseSlots({ gpus: [], ranks: 2 }, { x: 'ipc://@a', y: 'ipc://@b' }), [
    { endpoint: 'ipc://@a', ranks: [0] },
    { endpoint: 'ipc://@b', ranks: [1] }
  ])
  const wrong: Array<Record<string, string>> = [{}, { a: 'ipc://@a', b: 'ipc://@b', c: 'ipc://@c' }]
  for (const handles of wrong) {
    t.throws(() => chooseSlots({ gpus: [], ranks: 2 }, handles), { code: 'INVALID_REQUEST' })
  }
})

t.test('endpoints are Unix sockets', async (t) => {
  t.equal(socketOf('ipc://@checkpoint-engine-GPU-1-0.sock'), '\0checkpoint-engine-GPU-1-0.sock')
  t.equal(socketOf('ipc:///no/such.sock'), '/no/such.sock')
  for (
    const endpoint of [
      'tcp://127.0.0.1:1',
      'ipc://a',
      'ipc://',
      'ipc://@',
      'ipc://@a b',
      `ipc:///${'x'.repeat(120)}`,
      'ipc:///etc\0x'
    ]
  ) {
    t.throws(() => socketOf(endpoint), { code: 'INVALID_REQUEST', param: 'zmq_handles' }, endpoint)
  }
})

/** A REQ peer at a socket in the file system; `events` are the messages that it reads. */
async function bound (
  t: Test,
  greet = true
): Promise<{ path: string, peer: Promise<Socket>, read: (socket: Socket, count: number) => Promise<Buffer[][]> }> {
  // A socket's path has at most 107 bytes.
  const folder = mkdtempSync(join(tmpdir(), 'refit-zmq-'))
  t.teardown(() => {
    rmSync(folder, { recursive: true })
  })
  const path = join(folder, 's')
  const server = createServer()
  server.listen(path)
  await once(server, 'listening')
  t.teardown(() => {
    server.close()
  })
  const peer = once(server, 'connection').then(([socket]) => {
    t.teardown(() => {
      ;(socket as Socket).destroy()
    })
    if (greet) (socket as Socket).write(Buffer.concat([zmtpGreeting(), zmtpReady('REQ')]))
    return socket as Socket
  })
  return { path, peer, read }
}

async function read (socket: Socket, count: number): Promise<Buffer[][]> {
  const reader = new ZmtpReader()
  const found: Buffer[][] = []
  for await (const [chunk] of eventsOf(socket)) {
    for (const event of reader.push(chunk)) if (event.type === 'message') found.push(event.frames)
    if (found.length >= count) return found
  }
  return found
}

async function* eventsOf (socket: Socket): AsyncGenerator<[Buffer]> {
  for (;;) yield await once(socket, 'data') as [Buffer]
}

t.test('two requests are received one after another and get replies', async (t) => {
  const { path, peer, read } = await bound(t)
  const replier = await Replier.connect({ path, name: 'it', connectMs: 60_000, signal: never })
  const socket = await peer
  const replies = read(socket, 2)
  for (const body of ['a', 'b']) {
    socket.write(zmtpMessage([Buffer.alloc(0), Buffer.from(body)]))
    t.equal((await replier.receive(60_000, never)).toString(), body)
    t.ok(replier.hasRequest)
    replier.reply(body === 'a' ? '' : 'no')
  }
  t.same(await replies, [[Buffer.alloc(0), Buffer.alloc(0)], [Buffer.alloc(0), Buffer.from('no')]])
  socket.write(Buffer.concat([zmtpMessage([Buffer.alloc(0), Buffer.from('last')])]))
  socket.end()
  t.equal(
    (await replier.receive(60_000, never)).toString(),
    'last',
    'a request before the end of the connection is received'
  )
  replier.reply('')
  await t.rejects(replier.receive(60_000, never), {
    code: 'ZMQ_UNREACHABLE',
    message: /it (closed|: the connection is closed)/
  })
  replier.close()
})

t.test('silence, a peer that is no REQ socket, and an unbound socket are errors', async (t) => {
  const silent = await bound(t)
  const replier = await Replier.connect({ path: silent.path, name: 'it', connectMs: 60_000, signal: never })
  await t.rejects(replier.receive(20, never), { code: 'DEADLINE', message: /it has sent nothing for 0\.02 s/ })
  const control = new AbortController()
  const waiting = replier.receive(60_000, control.signal)
  control.abort(new Error('enough'))
  await t.rejects(waiting, { message: 'enough' })
  ;(await silent.peer).write(zmtpMessage([Buffer.from('no envelope')]))
  await t.rejects(replier.receive(60_000, never), { code: 'ZMQ_PROTOCOL', message: /1 frames/ })
  replier.close()
  const other = await bound(t, false)
  const refused = t.rejects(Replier.connect({ path: other.path, name: 'it', connectMs: 60_000, signal: never }), {
    code: 'ZMQ_PROTOCOL',
    message: /"PUB" socket/
  })
  ;(await other.peer).write(Buffer.concat([zmtpGreeting(), zmtpReady('PUB' as 'REQ')]))
  await refused
})

t.test('no refusal tells a path that exists from one that does not', async t => {
  // The paths of sockets are short.
  const folder = mkdtempSync(join(tmpdir(), 'refit-zmq-'))
  t.teardown(() => rmSync(folder, { recursive: true }))
  writeFileSync(join(folder, 'file'), 'x')
  const stale = join(folder, 'stale')
  const server = createServer()
  await new Promise<void>(resolve => server.listen(stale, resolve))
  linkSync(stale, join(folder, 'kept'))
  await new Promise(resolve => server.close(resolve))
  for (const path of ['nothing', 'nothing/at/all', 'file', 'file/below', '.', 'kept']) {
    await t.rejects(
      Replier.connect({ path: socketOf(`ipc://${join(folder, path)}`), name: 'it', connectMs: 150, signal: never }),
      {
        code: 'ZMQ_UNREACHABLE',
        message: /^it: the socket was not bound within 0\.15 s\. It is bound on this machine, /
      },
      path
    )
  }
  await t.rejects(Replier.connect({ path: '\0nobody-binds-this', name: 'it', connectMs: 150, signal: never }), {
    message: /^it: the socket was not bound within 0\.15 s\. It is bound on this machine, /
  })
})
