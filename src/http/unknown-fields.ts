import type { FastifyInstance } from 'fastify'

interface Schema {
  properties?: Record<string, Schema>
  anyOf?: Schema[]
  additionalProperties?: unknown
}

const REMEMBERED = 1000

/** Logs each unknown field of a body once per route: trainers send more fields than servers read. */
export function logUnknownFields (app: FastifyInstance): void {
  const seen = new Set<string>()
  app.addHook('preHandler', async request => {
    const { properties: known, additionalProperties } = (request.routeOptions.schema?.body ?? {}) as Schema
    if (known === undefined || typeof request.body !== 'object' || request.body === null) return
    // The count is bounded, because the names come from clients.
    for (const field of seen.size >= REMEMBERED ? [] : unknownFields(known, request.body)) {
      if (seen.size >= REMEMBERED) break
      const key = `${request.routeOptions.url} ${field.slice(0, 100)}`
      if (seen.has(key)) continue
      seen.add(key)
      request.log.info({ route: request.routeOptions.url, field: field.slice(0, 100) }, 'unknown field ignored')
    }
    if (additionalProperties !== true) request.body = knownOf(known, request.body)
  })
}

/**
 * The body without its unknown fields: nothing reads them, and the body may wait for long. A copy of the few is faster
 * than to take a hundred thousand out.
 */
function knownOf (known: Record<string, Schema>, body: object): object {
  if (Array.isArray(body)) return body
  return Object.fromEntries(
    Object.keys(known).filter(field => Object.hasOwn(body, field)).map(field => [field, Reflect.get(body, field)])
  )
}

/** Unknown fields of the body, and of objects in it (sampling parameters) whose fields are known. */
function* unknownFields (known: Record<string, Schema>, body: object): Generator<string> {
  for (const field of Object.keys(body)) {
    if (!Object.hasOwn(known, field)) {
      yield field
      continue
    }
    const value: unknown = (body as Record<string, unknown>)[field]
    if (typeof value !== 'object' || value === null || Array.isArray(value)) continue
    const { properties, anyOf = [] } = known[field]!
    const inner = properties ?? anyOf.find(branch => branch.properties !== undefined)?.properties ?? {}
    if (Object.keys(inner).length === 0) continue
    for (const name of Object.keys(value)) if (!Object.hasOwn(inner, name)) yield `${field}.${name}`
  }
}
