import type { FastifyRequest } from 'fastify'

/**
 * Refuses a body without a content type: pages of browsers can send such bodies anywhere without asking the server
 * first (CORS). A GET's body is exempt, because browsers send none.
 */
export function requireContentType ({ headers, method }: FastifyRequest): void {
  const { 'content-type': type = '', 'content-length': length = '0', 'transfer-encoding': encoding } = headers
  if (type !== '' || method === 'GET' || method === 'HEAD' || (encoding === undefined && length === '0')) return
  throw mediaTypeError('the body has no content type; send JSON with "content-type: application/json"')
}

/** 415 with Fastify's code. */
export function mediaTypeError (message: string): Error {
  return Object.assign(new Error(message), { statusCode: 415, code: 'FST_ERR_CTP_INVALID_MEDIA_TYPE' })
}
