import type { FastifyRequest } from 'fastify'
import { RefitError } from '../../errors.ts'
import { sendContinue } from './expect-continue.ts'
import { dropRest, pump } from './upload-pump.ts'
import { BYTES, uploadType } from './upload-types.ts'

/**
 * The body of a request on a route with uploads, which has exactly `size` bytes. Nothing is read of any other body.
 * Throws INVALID_REQUEST, BODY_BROKEN or BODY_STALLED.
 */
export async function readBytes (request: FastifyRequest, size: number, stallMs: number): Promise<Uint8Array> {
  const { 'content-length': length, 'content-type': type } = request.headers
  if (uploadType(request) !== BYTES || length !== `${size}`) {
    throw new RefitError(
      'INVALID_REQUEST',
      `expected a body of ${size} bytes of ${BYTES}, got ${length ?? 'no content-length'} of ${type ?? 'no type'}`
    )
  }
  sendContinue(request.raw)
  const bytes = Buffer.allocUnsafeSlow(size)
  let at = 0
  try {
    await pump(request.raw, {
      take: chunk => {
        at += chunk.copy(bytes, at)
        return undefined
      },
      spent: () => {},
      stallMs,
      broke: () => {},
      signal: new AbortController().signal
    })
  } catch (error) {
    dropRest(request.raw)
    throw error
  }
  if (at === size) return bytes
  throw new RefitError('BODY_BROKEN', `the body has ${at} bytes, ${size} were announced`)
}
