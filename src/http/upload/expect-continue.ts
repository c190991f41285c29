import type { IncomingMessage, Server, ServerResponse } from 'node:http'

const waiting = new WeakMap<IncomingMessage, ServerResponse>()

/**
 * If a client sends `Expect: 100-continue`, Node replies 100 before any handler has seen the request. With this
 * function the server replies 100 only when `sendContinue` is called, so a body that is refused for its key, its type
 * or its length is never sent.
 */
export function deferContinue (server: Server): void {
  server.on('checkContinue', (request: IncomingMessage, response: ServerResponse) => {
    waiting.set(request, response)
    server.emit('request', request, response)
  })
}

/** Replies 100, so that the client sends its body. Does nothing if the client expects no 100 or already has it. */
export function sendContinue (request: IncomingMessage): void {
  waiting.get(request)?.writeContinue()
  waiting.delete(request)
}
