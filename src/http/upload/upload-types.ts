import type { FastifyRequest } from 'fastify'

declare module 'fastify' {
  interface FastifyContextConfig {
    /** The route accepts uploads besides JSON; it reads them itself, from the raw request. */
    uploads?: true
  }
}

export const FORM = 'multipart/form-data'
export const BYTES = 'application/octet-stream'

/** The type of an upload that the request's route accepts; undefined for any other request. */
export function uploadType (request: FastifyRequest): typeof FORM | typeof BYTES | undefined {
  if (request.routeOptions.config.uploads !== true || request.method !== 'POST') return undefined
  const type = request.headers['content-type']?.split(';', 1)[0]?.trim().toLowerCase()
  return type === FORM || type === BYTES ? type : undefined
}
