import type { FastifyInstance } from 'fastify'

/** Connections that are idle are closed by the server's close itself; one whose reply ends later is idle a turn after that, and closed then. */
export function closeIdle (app: FastifyInstance): void {
  let isClosing = false
  app.addHook('preClose', async () => {
    isClosing = true
  })
  app.addHook('onResponse', async () => {
    if (isClosing) {
      setImmediate(() => {
        app.server.closeIdleConnections()
      })
    }
  })
}
