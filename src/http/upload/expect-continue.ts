import type { IncomingMessage, Server, ServerResponse } from 'node:http'

const waiting = new WeakMap<IncomingMessage, ServerResponse>()

/**
 * Node tells a client that sends `Expect: 100-continue` to send its body before anybody has looked at the request. With
 * this, the server does so when `sendContinue` is called: a body that is refused for its key, its type or its length is
 * never sent.
 */
export function deferContinue (server: Server): void {
  server.on('checkContinue', (request: IncomingMessage, response: ServerResponse) => {
    waiting.set(request, response)
    server.emit('request', request, response)
  })
}

/** Tells the client to send its body. Does nothing if the client did not ask, or if Node has told it already. */
export function sendContinue (request: IncomingMessage): void {
  waiting.get(request)?.writeContinue()
  waiting.delete(request)
}
