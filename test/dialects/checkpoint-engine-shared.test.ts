import { randomBytes } from 'node:crypto'
import { once } from 'node:events'
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { createServer } from 'node:net'
import type { Socket } from 'node:net'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import t from 'tap'
import { engineServer, modelFolder } from '../helpers/gateway.ts'
import { global } from '../helpers/pickles.ts'
import { pickle } from '../helpers/zmq-sender.ts'
import { zmtpGreeting, zmtpMessage, zmtpReady, ZmtpReader } from '../../src/wire/trainers/zmtp.ts'

const NORM = 'model.norm.weight'

t.test('a second update does not connect to the sockets of a running one', async t => {
  const { url, engine } = await engineServer(t, modelFolder(t), {})
  const name = `verl_weights_${randomBytes(16).toString('hex')}`
  writeFileSync(`/dev/shm/${name}`, Buffer.alloc(4096))
  const folder = mkdtempSync(join(tmpdir(), 'refit-zmq-'))
  const path = join(folder, 's')
  const server = createServer()
  t.teardown(() => {
    server.close()
    rmSync(folder, { recursive: true })
    rmSync(`/dev/shm/${name}`)
  })
  // A REQ socket of libzmq sends each request to the next of its connections.
  const peers: Socket[] = []
  const answers: string[] = []
  let answered = (): void => {}
  server.on('connection', socket => {
    peers.push(socket)
    const reader = new ZmtpReader()
    socket
      .on('error', () => {})
      .on('close', () => {
        peers.splice(peers.indexOf(socket), 1)
      })
      .on('data', chunk => {
        for (const event of reader.push(chunk)) {
          if (event.type !== 'message') continue
          answers.push(String(event.frames[1]))
          answered()
        }
      })
    socket.write(Buffer.concat([zmtpGreeting(), zmtpReady('REQ')]))
  })
  const ask = async (turn: number, message: Buffer): Promise<void> => {
    const answer = new Promise<void>(resolve => {
      answered = resolve
    })
    peers[turn % peers.length]!.write(zmtpMessage([Buffer.alloc(0), message]))
    await answer
  }
  server.listen(path)
  await once(server, 'listening')
  const update = async (label: string): Promise<{ status: number, body: any }> => {
    const reply = await fetch(`${url}/update_weights_from_ipc`, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify({ zmq_handles: { 0: `ipc://${path}` }, weight_version: label, timeout: 5 })
    })
    return { status: reply.status, body: await reply.json() }
  }
  const connected = once(server, 'connection')
  const first = update('first')
  await connected
  await ask(0, pickle({ name, size: 4096 }))
  const second = update('second')
  await Promise.race([second, once(server, 'connection')])
  // The hidden size of the adder model.
  const last = pickle({
    bucket_meta: { [NORM]: { name: NORM, dtype: global('torch', 'float32'), shape: [96], offset: 0, handle: null } },
    is_last: true
  })
  await ask(1, last)
  t.match(await second, { status: 409, body: { error: { code: 'CONFLICT' } } })
  t.match(await first, { status: 200 })
  t.same(answers, ['', ''])
  t.equal(engine.weightVersion, 'first')
})
