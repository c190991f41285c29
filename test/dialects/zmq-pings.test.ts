import { mkdtempSync, rmSync } from 'node:fs'
import { createServer } from 'node:net'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import t from 'tap'
import { Replier } from '../../src/dialects/checkpoint-engine/zmq-rep.ts'
import { zmtpGreeting, zmtpReady } from '../../src/wire/trainers/zmtp.ts'

t.test('a peer that sends heartbeats without end is refused', async t => {
  // The path of a socket is at most 107 bytes.
  const folder = mkdtempSync(join(tmpdir(), 'refit-zmq-'))
  const path = join(folder, 's')
  // A command frame: PING, two bytes of time to live, no context.
  const ping = Buffer.concat([Buffer.of(4, 7, 4), Buffer.from('PING'), Buffer.of(0, 0)])
  const flood = Buffer.concat(Array.from({ length: 10_000 }, () => ping))
  const server = createServer(socket => {
    socket.on('error', () => {}).resume()
    socket.write(zmtpGreeting())
    socket.write(zmtpReady('REQ'))
    const more = (): void => {
      if (!socket.destroyed) socket.write(flood, more)
    }
    more()
  })
  await new Promise<void>(resolve => server.listen(path, resolve))
  t.teardown(() => {
    server.close()
    rmSync(folder, { recursive: true, force: true })
  })
  const { signal } = new AbortController()
  const replier = await Replier.connect({ path, name: 'the sender', connectMs: 10_000, signal })
  t.teardown(() => {
    replier.close()
  })
  await t.rejects(replier.receive(120_000, signal), { code: 'ZMQ_PROTOCOL', message: /heartbeats without end/ })
})
