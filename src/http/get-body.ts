import type { FastifyRequest } from 'fastify'
import { readJsonBody } from './body-parser.ts'
import type { bodyCheck } from './validation.ts'

/** Fields of a GET: those of its JSON body, which trainers send, take precedence over those of its query. */
export async function getBody<T> (
  request: FastifyRequest<{ Querystring: object }>,
  check: ReturnType<typeof bodyCheck>
): Promise<T> {
  const body = await readJsonBody(request)
  const fields = typeof body === 'object' && body !== null && !Array.isArray(body)
    ? { ...request.query as object, ...body }
    : body
  const checked = check(fields)
  if ('error' in checked) throw checked.error
  return checked.value as T
}
