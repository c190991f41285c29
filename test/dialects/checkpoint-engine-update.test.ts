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
const LAYER = 'model.layers.0.input_layernorm.weight'

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

interface Message { names: readonly string[], isLast?: boolean, handle?: number | null }

/** A bucket of verl's, whose tensors are all zeros. */
function bucket ({ names, isLast = false, handle = null }: Message, size: number): Buffer {
  const dtype = global('torch', 'float32')
  return pickle({ bucket_meta: Object.fromEntries(names.map(name => [name, { name, dtype, shape: [size], offset: 0, handle }])), is_last: isLast })
}

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

/** What comes of an update whose two senders send these, and of the weights. */
async function exchange (t: Test, { url, size }: { url: string, size: number }, bySeat: readonly [readonly Message[], readonly Message[]]): Promise<{ status: number, body: any, answers: string[][] }> {
  const senders = await Promise.all(bySeat.map(async messages => {
    const name = `verl_weights_${randomBytes(16).toString('hex')}`
    writeFileSync(`/dev/shm/${name}`, Buffer.alloc(4096))
    t.teardown(() => { rmSync(`/dev/shm/${name}`) })
    return await sender(t, [pickle({ name, size: 4096 }), ...messages.map(message => bucket(message, size))])
  }))
  const reply = await fetch(`${url}/update_weights_from_ipc`, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify({ zmq_handles: Object.fromEntries(senders.map(({ endpoint }, rank) => [rank, endpoint])), weight_version: 'new' }) })
  return { status: reply.status, body: await reply.json(), answers: await Promise.all(senders.map(async ({ answers }) => await answers)) }
}

t.test('senders of one engine have to send the same buckets: what differs is told in words, and nothing is written', async t => {
  const { url, engine } = await engineServer(t, modelFolder(t), { tp: 2 })
  // The adder's hidden size.
  const target = { url, size: 96 }
  const before = await engine.checksums()
  for (const [name, first, second, words] of [
    ['the last bucket for the second one alone', [{ names: [NORM] }], [{ names: [NORM], isLast: true }], /for one this bucket is the last one/],
    ['the last bucket for the first one alone', [{ names: [NORM], isLast: true }], [{ names: [NORM] }], /for one this bucket is the last one/],
    ['nothing of the first one', [{ names: [] }], [{ names: [NORM] }], /a bucket of 1 tensors, another of 0/],
    ['nothing of the second one', [{ names: [NORM] }], [{ names: [] }], /a bucket of 0 tensors, another of 1/],
    ['a handle of the first one alone', [{ names: [NORM], handle: 1 }], [{ names: [], handle: null }], /by its own handle/],
    ['other tensors', [{ names: [NORM] }], [{ names: [LAYER] }], /tensor 0 of the bucket is model\.layers\.0\.input_layernorm\.weight for one, model\.norm\.weight for another/]
  ] as const) {
    const { status, body, answers } = await exchange(t, target, [first, second])
    t.equal(status, 502, name)
    t.match(body, { error: { code: 'ZMQ_PROTOCOL', message: words } }, name)
    for (const [, answer] of answers) t.match(answer, /senders are not at the same step/, name)
    t.same(await engine.checksums(), before, name)
  }
  const { status, answers } = await exchange(t, target, [[{ names: [NORM] }, { names: [], isLast: true }], [{ names: [NORM] }, { names: [], isLast: true }]])
  t.equal(status, 200)
  t.same(answers, [['', '', ''], ['', '', '']])
  t.equal(engine.weightVersion, 'new')
  const after = await engine.checksums()
  t.same(after.tensors.filter((tensor, i) => JSON.stringify(tensor) !== JSON.stringify(before.tensors[i])).map(({ name }) => name), [NORM])
})
