import type { FastifyInstance } from 'fastify'

const REMEMBERED = 1000

/** Says once per route and field that a field of a body is known to nobody here: trainers send more than servers read. */
export function logUnknownFields (app: FastifyInstance): void {
  const seen = new Set<string>()
  app.addHook('preHandler', async request => {
    const known = (request.routeOptions.schema?.body as { properties?: Record<string, unknown> } | undefined)?.properties
    if (known === undefined || typeof request.body !== 'object' || request.body === null) return
    for (const field of Object.keys(request.body)) {
      if (Object.hasOwn(known, field)) continue
      const key = `${request.routeOptions.url} ${field.slice(0, 100)}`
      // Bounded: the names come from clients.
      if (seen.has(key) || seen.size >= REMEMBERED) continue
      seen.add(key)
      request.log.info({ route: request.routeOptions.url, field: field.slice(0, 100) }, 'unknown field ignored')
    }
  })
}
