import { Type } from 'typebox'
import type { FastifyInstance } from 'fastify'
import { refusals } from '../../src/http/schemas.ts'
import type { Feed } from '../../src/ui/feed.ts'

/** The event stream of a page. */
export function serveEvents (app: FastifyInstance, feed: Feed, tags: string[]): void {
  const events = Type.String({ description: 'Frames `event: hello` (everything), then `event: state` (what changed).' })
  // Before the server waits for replies to end: these end only here.
  app.addHook('preClose', async () => {
    feed.close()
  })

  app.get('/ui/events', {
    config: { auth: 'normal' },
    schema: {
      operationId: 'uiEvents',
      summary: 'The event stream of the page',
      description: 'At most four frames a second. A reader that is slow loses frames and gets a new hello. Fields ' +
        'may change between versions.',
      tags,
      response: {
        200: { description: 'Server-sent events.', content: { 'text/event-stream': { schema: events } } },
        ...refusals()
      }
    }
  }, async (_request, reply) => {
    const reader = feed.open()
    reply.raw.once('close', () => reader.destroy())
    return await reply
      .header('content-type', 'text/event-stream; charset=utf-8')
      .header('cache-control', 'no-store')
      .header('x-accel-buffering', 'no')
      .send(reader)
  })
}
