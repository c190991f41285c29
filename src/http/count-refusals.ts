import type { FastifyInstance } from 'fastify'
import { Counter } from 'prom-client'
import type { Registry } from 'prom-client'
import { refusalOf } from './error-reply.ts'

/** Codes that alerts watch: an increase is only seen of a series that has been 0 before. */
const WATCHED = ['BODY_TOO_LARGE', 'NO_MEMORY', 'QUEUE_FULL', 'UNAUTHORIZED']

/** Counts the refusals and failures of all routes that `app` registers later, by code: codes are a closed set. */
export function countRefusals (app: FastifyInstance, registry: Registry, name: string): void {
  const refused = new Counter({
    name,
    help: 'Requests that were refused or failed before their reply began, by the code of the error',
    labelNames: ['code'],
    registers: [registry]
  })
  for (const code of WATCHED) refused.inc({ code }, 0)
  app.addHook('onError', async (_request, _reply, error) => {
    refused.inc({ code: refusalOf(error).code })
  })
}
