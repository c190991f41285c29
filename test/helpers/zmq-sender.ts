import { once } from 'node:events'
import { mkdtempSync, rmSync } from 'node:fs'
import { createServer } from 'node:net'
import type { Socket } from 'node:net'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import type { Test } from 'tap'
import { zmtpGreeting, zmtpMessage, zmtpReady, ZmtpReader } from '../../src/wire/trainers/zmtp.ts'
import { assemble, PROTO4, str, u32 } from './pickles.ts'

// A stand-in for parameter servers and verl's workers: a socket that sends pickles.

/** A value as opcodes of a pickle. */
function value (it: unknown): Buffer {
  if (Buffer.isBuffer(it)) return it
  if (typeof it === 'string') return str(it)
  if (typeof it === 'number') return assemble('J', u32(it))
  if (typeof it === 'boolean') return assemble(it ? '\x88' : '\x89')
  if (it === null) return assemble('N')
  if (Array.isArray(it)) return assemble('(', ...it.map(value), 't')
  return assemble('}(', ...Object.entries(it as object).flatMap(([name, member]) => [str(name), value(member)]), 'u')
}

export const pickle = (it: unknown): Buffer => assemble(PROTO4, value(it), '.')

/**
 * A sender that only sends its messages, one after each answer, and collects the answers. `prepare` runs before each
 * message, to fill a buffer.
 */
export async function sender (
  t: Test,
  messages: readonly Buffer[],
  prepare: (message: number) => void = () => {}
): Promise<{ endpoint: string, answers: Promise<string[]> }> {
  const folder = mkdtempSync(join(tmpdir(), 'refit-zmq-'))
  const path = join(folder, 's')
  const server = createServer()
  server.listen(path)
  await once(server, 'listening')
  t.teardown(() => {
    server.close()
    rmSync(folder, { recursive: true })
  })
  return {
    endpoint: `ipc://${path}`,
    answers: once(server, 'connection').then(async ([socket]) => await converse(socket as Socket, messages, prepare))
  }
}

async function converse (
  socket: Socket,
  messages: readonly Buffer[],
  prepare: (message: number) => void
): Promise<string[]> {
  const reader = new ZmtpReader()
  const answers: string[] = []
  const send = (): unknown => {
    const message = messages[answers.length]
    if (message === undefined) return socket.end()
    prepare(answers.length)
    socket.write(zmtpMessage([Buffer.alloc(0), message]))
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
