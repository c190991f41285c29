import type { FastifyInstance } from 'fastify'

/**
 * The server's close ends idle connections itself. A connection whose reply ends later becomes idle one turn after the
 * reply, and is closed then.
 */
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
