import { randomBytes } from 'node:crypto'
import { once } from 'node:events'
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { createServer } from 'node:net'
import type { Socket } from 'node:net'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { zmtpGreeting, zmtpMessage, zmtpReady, ZmtpReader } from '../../src/wire/zmtp.ts'
import { engineServer, modelFolder } from '../helpers/gateway.ts'
import { assemble, global, PROTO4, str, u32 } from '../helpers/pickles.ts'

const NORM = 'model.norm.weight'

/** As a pickle's opcodes. */
function value (it: unknown): Buffer {
  if (Buffer.isBuffer(it)) return it
  if (typeof it === 'string') return str(it)
  if (typeof it === 'number') return assemble('J', u32(it))
  if (typeof it === 'boolean') return assemble(it ? '\x88' : '\x89')
  if (it === null) return assemble('N')
  if (Array.isArray(it)) return assemble('(', ...it.map(value), 't')
  return assemble('}(', ...Object.entries(it as object).flatMap(([name, member]) => [str(name), value(member)]), 'u')
}

const pickle = (it: unknown): Buffer => assemble(PROTO4, value(it), '.')

/** A sender that is asked for nothing but its messages, one after each answer; what it is answered. */
async function sender (t: Test, messages: readonly Buffer[]): Promise<{ endpoint: string, answers: Promise<string[]> }> {
  const folder = mkdtempSync(join(tmpdir(), 'refit-zmq-'))
  const path = join(folder, 's')
  const server = createServer()
  server.listen(path)
  await once(server, 'listening')
  t.teardown(() => {
    server.close()
    rmSync(folder, { recursive: true })
  })
  return { endpoint: `ipc://${path}`, answers: once(server, 'connection').then(async ([socket]) => await converse(socket as Socket, messages)) }
}

async function converse (socket: Socket, messages: readonly Buffer[]): Promise<string[]> {
  const reader = new ZmtpReader()
  const answers: string[] = []
  const send = (): void => {
    const message = messages[answers.length]
    if (message === undefined) socket.end()
    else socket.write(zmtpMessage([Buffer.alloc(0), message]))
  }
  socket.write(Buffer.concat([zmtpGreeting(), zmtpReady('REQ')]))
  send()
  socket.on('error', () => {})
  socket.on('data', chunk => {
    for (const event of reader.push(chunk)) {
      if (event.type !== 'message') continue
      answers.push(String(event.frames[1]))
      send()
    }
  })
  await once(socket, 'close')
  return answers
}

/** A pickled ValueError('its trainer has gone'). */
const stop = assemble(PROTO4, global('builtins', 'ValueError'), '(', str('its trainer has gone'), 't', 'R', '.')

for (const inScope of [true, false]) {
  t.test(`what a parameter server gives up after it was written is not said to be unchanged (${inScope ? 'in a scope' : 'alone, all of the model'})`, async t => {
    const { url, engine } = await engineServer(t, modelFolder(t), {})
    const post = async (path: string, body: object): Promise<{ status: number, body: any }> => {
      const reply = await fetch(url + path, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(body) })
      return { status: reply.status, body: await reply.json() }
    }
    const name = `verl_weights_${randomBytes(16).toString('hex')}`
    writeFileSync(`/dev/shm/${name}`, Buffer.alloc(1 << 20))
    t.teardown(() => { rmSync(`/dev/shm/${name}`) })
    const before = (await engine.checksums()).tensors
    if (inScope) t.match(await post('/begin_weight_update', {}), { status: 200 })
    const dtype = global('torch', 'float32')
    const all = inScope ? [NORM] : before.map(({ name }) => name)
    const table = (engine as any).held.store.table
    const whole = pickle({ bucket_meta: Object.fromEntries(all.map(name => [name, { name, dtype, shape: [...table.tensors.get(name).shape], offset: 0, handle: null }])), is_last: false })
    const { endpoint } = await sender(t, [pickle({ name, size: 1 << 20 }), whole, stop])
    const reply = await post('/update_weights_from_ipc', { zmq_handles: { 0: endpoint } })
    const after = (await engine.checksums()).tensors
    t.notSame(after, before)
    t.match(reply, { status: 409, body: { message: /gave the update up: ValueError: its trainer has gone\. What came before has been written/ } })
  })
}
