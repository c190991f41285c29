import { readFileSync } from 'node:fs'
import type { IncomingMessage } from 'node:http'
import type { Socket } from 'node:net'
import type { FastifyInstance } from 'fastify'
import { dropRest, LINGER_MS } from './upload/upload-pump.ts'
import { uploadType } from './upload/upload-types.ts'

export interface ConnectionBounds {
  /** Longest that a client may send nothing of a body that is being read, in milliseconds (default 60000). */
  stallMs?: number | undefined
  /** Longest that the rest of a refused body is read, in milliseconds (default 30000). */
  lingerMs?: number
  /** Longest that a client may read nothing of a reply that waits for it, in milliseconds (default 600000). */
  readerMs?: number
  /**
   * From this number of connections on, those that wait for no reply are closed: idle ones, and those whose refused
   * body goes on (default: half of the descriptors).
   */
  most?: number
}

const STALL_MS = 60_000
/** A trainer's process may be busy with something else for minutes. */
const READER_MS = 600_000
/** Looks without progress after which a connection is cut. The watch of an upload, with its own error, ends before. */
const STRIKES = 5

interface Watched {
  /** The last request of the connection. */
  request: IncomingMessage | null
  /** It has its reply. The rest of its body may still come. */
  isAnswered: boolean
  bytes: number
  strikes: number
  /** Bytes that the client's machine has taken, and the looks since there were more. */
  taken: number
  unread: number
}

/**
 * Bounds how long a client holds a connection, and with it a descriptor, without a reply that is due: a body that stops
 * in the middle, the rest of a refused body, and idle connections once there are many. Node ends those that send no
 * head within a minute.
 */
export function boundConnections (
  app: FastifyInstance,
  { stallMs = STALL_MS, readerMs = READER_MS, lingerMs = LINGER_MS, most = descriptors() / 2 }: ConnectionBounds = {}
): void {
  const { server } = app
  const open = new Map<Socket, Watched>()
  server.on('connection', (socket: Socket) => {
    open.set(socket, { request: null, isAnswered: false, bytes: 0, strikes: 0, taken: 0, unread: 0 })
    socket.once('close', () => {
      open.delete(socket)
    })
    if (open.size <= most) return
    server.closeIdleConnections()
    for (const [socket, { request, isAnswered }] of open) {
      if (isAnswered && request?.complete === false) socket.destroy()
    }
  })
  server.prependListener('request', (request: IncomingMessage) => {
    const watched = open.get(request.socket)
    if (watched !== undefined) Object.assign(watched, { request, isAnswered: false, strikes: 0 })
  })
  // Counts looks, not time: a process that was suspended has not read what came meanwhile.
  const lookMs = stallMs / (STRIKES - 1)
  const timer = setInterval(() => {
    for (const [socket, watched] of open) {
      look(app, socket, watched)
      lookAtReader(app, socket, watched, readerMs / lookMs)
    }
  }, lookMs)
    .unref()
  app.addHook('onClose', async () => {
    clearInterval(timer)
  })
  app.addHook('onResponse', async request => {
    const watched = open.get(request.raw.socket)
    if (watched?.request === request.raw) watched.isAnswered = true
    const most = uploadType(request) === undefined ? request.routeOptions.bodyLimit : Infinity
    dropRest(request.raw, { most, lingerMs })
  })
}

function look ({ server }: FastifyInstance, socket: Socket, watched: Watched): void {
  const { request, bytes } = watched
  watched.bytes = socket.bytesRead
  const waits = request !== null && isAwaited(request) && socket.bytesRead === bytes
  watched.strikes = waits ? watched.strikes + 1 : 0
  if (watched.strikes < STRIKES) return
  const error = Object.assign(new Error('the body stopped'), { code: 'ERR_HTTP_REQUEST_TIMEOUT' })
  // Fastify replies 408 and closes.
  if (!server.emit('clientError', error, socket)) socket.destroy(error)
}

/** Ends a reply whose client has stopped to read: what waits for it would be held for ever. */
function lookAtReader ({ log }: FastifyInstance, socket: Socket, watched: Watched, most: number): void {
  const taken = socket.bytesWritten - socket.writableLength
  watched.unread = socket.writableLength > 0 && taken === watched.taken ? watched.unread + 1 : 0
  watched.taken = taken
  if (watched.unread <= most) return
  log.warn({ url: watched.request?.url?.slice(0, 200) }, 'the client reads nothing of its reply: connection closed')
  socket.destroy()
}

/** A reader of the body has taken all that came and waits for more. */
function isAwaited ({ complete, destroyed, readableFlowing, readableLength }: IncomingMessage): boolean {
  return !complete && !destroyed && readableFlowing !== null && readableLength === 0
}

/** How many descriptors this process may have. */
function descriptors (): number {
  try {
    const [, soft] = /^Max open files +(\d+)/m.exec(readFileSync('/proc/self/limits', 'utf8')) ?? []
    return Number(soft ?? Infinity)
  } catch {
    return Infinity
  }
}
