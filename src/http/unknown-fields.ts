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
    for (const field of unknownFields(known, request.body)) {
      const key = `${request.routeOptions.url} ${field.slice(0, 100)}`
      // The count is bounded, because the names come from clients.
      if (seen.has(key) || seen.size >= REMEMBERED) continue
      seen.add(key)
      request.log.info({ route: request.routeOptions.url, field: field.slice(0, 100) }, 'unknown field ignored')
    }
    if (additionalProperties !== true) dropUnknown(known, request.body)
  })
}

/** Nothing reads these fields, and the body may wait for long. */
function dropUnknown (known: Record<string, Schema>, body: object): void {
  for (const field of Object.keys(body)) if (!Object.hasOwn(known, field)) Reflect.deleteProperty(body, field)
}

/** Unknown fields of the body, and of objects in it (sampling parameters) whose fields are known. */
function unknownFields (known: Record<string, Schema>, body: object): string[] {
  return Object.entries(body).flatMap(([field, value]: [string, unknown]) => {
    if (!Object.hasOwn(known, field)) return [field]
    if (typeof value !== 'object' || value === null || Array.isArray(value)) return []
    const { properties, anyOf = [] } = known[field]!
    const inner = properties ?? anyOf.find(branch => branch.properties !== undefined)?.properties ?? {}
    return Object.keys(inner).length === 0
      ? []
      : Object.keys(value).filter(name => !Object.hasOwn(inner, name)).map(name => `${field}.${name}`)
  })
}
