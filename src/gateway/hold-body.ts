import type { IncomingMessage } from 'node:http'
import { RefitError } from '../errors.ts'

/**
 * A body as one piece of memory, which is taken once, by the length that is announced: chunks are copied as they come, while the sender sends on.
 * Throws BODY_TOO_LARGE, and BODY_BROKEN where it is not of that length.
 */
export async function holdBody (body: IncomingMessage, limit: number): Promise<Buffer> {
  const { 'content-length': announced } = body.headers
  const length = announced === undefined ? null : Number(announced)
  const tooLarge = (): RefitError => new RefitError('BODY_TOO_LARGE', `longer than the ${limit} bytes that a gateway holds of a request`)
  if (length !== null && length > limit) throw tooLarge()
  // Not of the pool: it may be large, and goes as soon as the engines have it.
  const memory = length === null ? null : Buffer.allocUnsafeSlow(length)
  const chunks: Buffer[] = []
  let size = 0
  for await (const chunk of body as AsyncIterable<Buffer>) {
    if (size + chunk.length > (length ?? limit)) throw tooLarge()
    if (memory === null) chunks.push(chunk)
    else chunk.copy(memory, size)
    size += chunk.length
  }
  if (memory === null) return Buffer.concat(chunks, size)
  if (size !== length) throw new RefitError('BODY_BROKEN', `content-length is ${length}, and ${size} bytes came`)
  return memory
}
