import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { connect } from 'node:net'
import type { Socket } from 'node:net'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { fileURLToPath } from 'node:url'
import t from 'tap'
import type { Test } from 'tap'
import { packageRoot } from '../../src/root.ts'

// A process that may have few descriptors, and more connections than that.

const MAIN = fileURLToPath(new URL('../../src/main.js', import.meta.url))
const DESCRIPTORS = 250
const CONNECTIONS = 300
const HEAD = 'host: localhost\r\ncontent-type: application/json\r\n'

async function serve (t: Test, command: string): Promise<number> {
  const child = spawn('sh', [
    '-c',
    `ulimit -n ${DESCRIPTORS}; exec "$0" "$@"`,
    process.execPath,
    MAIN,
    ...command.split(' ')
  ], {
    stdio: ['ignore', 'pipe', 'inherit'],
    env: { PATH: process.env.PATH, HOME: '/nonexistent' }
  })
  t.teardown(() => child.kill('SIGKILL'))
  for await (const line of createInterface({ input: child.stdout })) {
    const port = /is ready on http:\/\/127\.0\.0\.1:(\d+)/.exec(line)?.[1]
    if (port === undefined) continue
    child.stdout.resume()
    return Number(port)
  }
  throw new Error('the process ended before it listened')
}

/** Opens a connection, sends the bytes, and waits for the status of the reply; 0 if it is closed instead. */
async function send (t: Test, port: number, bytes: string): Promise<{ socket: Socket, status: number }> {
  const socket = connect(port, '127.0.0.1').on('error', () => {})
  t.teardown(() => socket.destroy())
  socket.write(bytes)
  let text = ''
  const answer = new Promise<number>(resolve => {
    socket.once('close', () => resolve(0)).on('data', chunk => {
      text += String(chunk)
      const status = /^HTTP\/1\.1 (\d{3}) [^]*\r\n\r\n/.exec(text)?.[1]
      if (status !== undefined) resolve(Number(status))
    })
  })
  await once(socket, 'connect')
  return { socket, status: await answer }
}

// The gateway replies 503: its engine is not there.
for (
  const [name, health, command] of [
    ['server', 200, `serve ${join(packageRoot, 'models/adder-base')} --port 0 --threads 1 --api-key key`],
    ['gateway', 503, 'gateway --port 0 --engine http://127.0.0.1:1 --api-key key']
  ] as const
) {
  t.test(`${CONNECTIONS} idle connections and ${CONNECTIONS} refused bodies shut nobody out of a ${name}`, async t => {
    const port = await serve(t, command)
    const idle = `GET /health HTTP/1.1\r\n${HEAD}\r\n`
    const refused = `POST /generate HTTP/1.1\r\n${HEAD}transfer-encoding: chunked\r\n\r\n1\r\n{\r\n`
    for (const [bytes, expected] of [[idle, health], [refused, 401]] as const) {
      for (let i = 0; i < CONNECTIONS; i++) {
        const { status } = await send(t, port, bytes)
        if (status !== expected) return t.fail(`connection ${i} with ${bytes.slice(0, 4)} got ${status}`)
      }
      t.equal((await send(t, port, `GET /health HTTP/1.1\r\n${HEAD}\r\n`)).status, health, `after ${bytes.slice(0, 4)}`)
    }
  })
}
