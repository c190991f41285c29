import type { IncomingMessage } from 'node:http'
import type { Readable } from 'node:stream'
import { RefitError } from '../../errors.ts'
import type { BodyClaim } from './body-memory.ts'
import { freeChunk, freeMemory } from '../../native/host-memory.ts'

/** From this length on, a body gets memory of its own. */
const LARGE_BYTES = 128 << 10

/**
 * Reads a body into one buffer. A long body gets memory of its own, of the announced length, which `freeBody` gives
 * back. Its chunks are copied as they come and given back at once: megabytes of them make the garbage collector search
 * the whole heap.
 * `headers`: those of the request, if `body` is its stream and no hook of the host has replaced it. `claim` grows with
 * the bytes that come. Throws BODY_TOO_LARGE, NO_MEMORY, and BODY_BROKEN if the length differs from the announced one
 * or the body ends early.
 */
export async function holdBody (
  body: Readable,
  limit: number,
  headers: IncomingMessage['headers'] = {},
  claim?: BodyClaim
): Promise<Buffer> {
  const { 'content-length': announced } = headers
  const length = announced === undefined ? null : Number(announced)
  const tooLarge = (): RefitError =>
    new RefitError('BODY_TOO_LARGE', `the body is larger than the ${limit} bytes that this route accepts`)
  if (length !== null && length > limit) throw tooLarge()
  const memory = length === null || length < LARGE_BYTES ? null : Buffer.allocUnsafeSlow(length)
  const chunks: Buffer[] = []
  let size = 0
  return await new Promise((resolve, reject) => {
    let settled = false
    // The request is not destroyed when it is refused: the reply still has to go out on the socket. The memory is freed
    // at once, because the garbage collector would keep it for long.
    const refuse = (makeError: () => Error): void => {
      if (settled) return
      settled = true
      body.off('data', onData)
      chunks.length = 0
      if (memory !== null) freeBody(memory)
      reject(makeError())
    }
    const breakOff = (): Error => broken(`it broke off after ${size} bytes`)
    const onData = (data: Buffer | string): void => {
      const chunk = typeof data === 'string' ? Buffer.from(data) : data
      const begin = size
      size += chunk.length
      if (size > (length ?? limit)) return refuse(tooLarge)
      try {
        claim?.grow(chunk.length)
      } catch (error) {
        return refuse(() => error as RefitError)
      }
      if (memory === null) {
        chunks.push(chunk)
        return
      }
      chunk.copy(memory, begin)
      // If a host listens too, the chunk may be in use elsewhere.
      if (body.listenerCount('data') === 1) freeChunk(chunk)
    }
    body.on('data', onData)
    body.once('end', () => {
      if (length !== null && size !== length) {
        refuse(() => broken(`content-length is ${length}, and ${size} bytes arrived`))
      }
      if (settled) return
      settled = true
      resolve(memory ?? Buffer.concat(chunks, size))
    })
    body.once('error', (error: Error & { statusCode?: number }) => {
      refuse(() => error.statusCode === undefined ? breakOff() : error)
    })
    // 'close' also comes after the end, when no error is needed: to make one costs tens of microseconds.
    body.once('close', () => {
      refuse(breakOff)
    })
  })
}

/** Call it when the body is not read any more. */
export function freeBody (body: Buffer): void {
  if (body.length >= LARGE_BYTES && body.length === body.buffer.byteLength) freeMemory(body)
}

function broken (what: string): RefitError {
  return new RefitError('BODY_BROKEN', `the body: ${what}`)
}
