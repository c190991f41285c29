import { createServer, request } from 'node:http'
import type { IncomingMessage, ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import type { Test } from 'tap'

/** A request with its whole body. */
export interface Passed {
  path: string
  headers: IncomingMessage['headers']
  body: Buffer
}

export interface Answered {
  status: number
  body: Buffer
}

/** Sends a request to the server behind the proxy. A body that is an object is sent as JSON. */
export type Forward = (
  passed: { path: string, headers?: Passed['headers'], body?: Buffer | object }
) => Promise<Answered>

interface FaultBase {
  /** Paths whose requests it takes; all others are passed on as they come. */
  takes: (path: string) => boolean
}

/** Answers in place of the server. */
interface HandlingFault extends FaultBase {
  /** `body` is what arrived; less than was announced if the client went away. Null: no answer. */
  handle: (passed: Passed, forward: Forward) => Promise<Answered | null>
}

/** Changes the JSON that the server answers. */
interface ChangingFault extends FaultBase {
  change: (body: any) => any
}

export type Fault = HandlingFault | ChangingFault

export interface FaultyProxy {
  url: string
  fault: Fault | null
}

/** An HTTP proxy that breaks what its fault takes. */
export async function faultyProxy (t: Test, target: string): Promise<FaultyProxy> {
  const forward: Forward = async ({ path, headers, body = Buffer.alloc(0) }) => {
    const isJson = !Buffer.isBuffer(body)
    const bytes = isJson ? Buffer.from(JSON.stringify(body)) : body
    const type = isJson ? 'application/json' : headers?.['content-type']
    const reply = await fetch(target + path, {
      method: 'POST',
      headers: type === undefined ? {} : { 'content-type': type },
      body: bytes as never
    })
    return { status: reply.status, body: Buffer.from(await reply.arrayBuffer()) }
  }
  const proxy: FaultyProxy = { url: '', fault: null }
  const server = createServer((incoming, outgoing) => {
    const { fault } = proxy
    if (fault?.takes(incoming.url!) !== true) passOn(target, incoming, outgoing)
    else if ('change' in fault) passOn(target, incoming, outgoing, fault.change)
    else void breakOne(fault, incoming, outgoing, forward)
  })
  await new Promise<void>(resolve => server.listen(0, '127.0.0.1', resolve))
  proxy.url = `http://127.0.0.1:${(server.address() as AddressInfo).port}`
  t.teardown(() => {
    server.closeAllConnections()
    server.close()
  })
  return proxy
}

async function breakOne (
  fault: HandlingFault,
  incoming: IncomingMessage,
  outgoing: ServerResponse,
  forward: Forward
): Promise<void> {
  const chunks: Buffer[] = []
  try {
    for await (const chunk of incoming) chunks.push(chunk)
  } catch { /* The client went away. */ }
  const answered = await fault.handle(
    { path: incoming.url!, headers: incoming.headers, body: Buffer.concat(chunks) },
    forward
  )
  if (answered === null) return
  outgoing.writeHead(answered.status, { 'content-type': 'application/json' })
  outgoing.end(answered.body)
}

function passOn (
  target: string,
  incoming: IncomingMessage,
  outgoing: ServerResponse,
  change?: ChangingFault['change']
): void {
  const { method, headers, url } = incoming
  const sending = request(target + url, { method: method!, headers, agent: false }, reply => {
    const { 'content-length': length, ...others } = reply.headers
    outgoing.writeHead(reply.statusCode!, change === undefined ? reply.headers : others)
    if (change === undefined) reply.pipe(outgoing)
    else changeAnswer(reply, outgoing, change).catch(() => outgoing.destroy())
    reply.on('error', () => outgoing.destroy())
  })
  sending.on('error', () => outgoing.destroy())
  incoming.on('error', () => sending.destroy())
  incoming.on('aborted', () => sending.destroy())
  outgoing.on('close', () => {
    if (!outgoing.writableEnded) sending.destroy()
  })
  incoming.pipe(sending)
}

async function changeAnswer (
  reply: IncomingMessage,
  outgoing: ServerResponse,
  change: ChangingFault['change']
): Promise<void> {
  const chunks: Buffer[] = []
  for await (const chunk of reply) chunks.push(chunk)
  outgoing.end(JSON.stringify(change(JSON.parse(Buffer.concat(chunks).toString()))))
}
