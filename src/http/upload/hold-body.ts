import type { IncomingMessage } from 'node:http'
import type { Readable } from 'node:stream'
import { RefitError } from '../../errors.ts'
import { freeChunk, freeMemory } from '../../native/host-memory.ts'

/** From here on a body is worth memory of its own. */
const LARGE_BYTES = 128 << 10

/**
 * A body in one piece. A long one has memory of its own, of the announced length, which `freeBody` gives back; chunks are copied as they come and given
 * back at once: megabytes of them make the collector search the whole heap. `headers`: of the request, where `body` is what came of it and no hook of a
 * host's has put another stream there. Throws BODY_TOO_LARGE, and BODY_BROKEN where it is not as long as announced or ends in the middle.
 */
export async function holdBody (
  body: Readable,
  limit: number,
  headers: IncomingMessage['headers'] = {}
): Promise<Buffer> {
  const { 'content-length': announced } = headers
  const length = announced === undefined ? null : Number(announced)
  const tooLarge = (): RefitError =>
    new RefitError('BODY_TOO_LARGE', `the body is larger than the ${limit} bytes that are taken here`)
  if (length !== null && length > limit) throw tooLarge()
  const memory = length === null || length < LARGE_BYTES ? null : Buffer.allocUnsafeSlow(length)
  const chunks: Buffer[] = []
  let size = 0
  return await new Promise((resolve, reject) => {
    // Not destroyed when it is refused: the reply still has to go out on the socket.
    body.on('data', (data: Buffer | string) => {
      const chunk = typeof data === 'string' ? Buffer.from(data) : data
      const begin = size
      size += chunk.length
      if (size > (length ?? limit)) return reject(tooLarge())
      if (memory === null) {
        chunks.push(chunk)
        return
      }
      chunk.copy(memory, begin)
      // Where a host listens too, it is not ours alone.
      if (body.listenerCount('data') === 1) freeChunk(chunk)
    })
    let ended = false
    body.once('end', () => {
      ended = true
      if (length !== null && size !== length) reject(broken(`content-length is ${length}, and ${size} bytes came`))
      else resolve(memory ?? Buffer.concat(chunks, size))
    })
    body.once('error', (error: Error & { statusCode?: number }) => {
      reject(error.statusCode === undefined ? broken(`it broke off after ${size} bytes`) : error)
    })
    // Also closed after its end, when nobody needs an error made.
    body.once('close', () => {
      if (!ended) reject(broken(`it broke off after ${size} bytes`))
    })
  })
}

/** Once nobody reads it any more. */
export function freeBody (body: Buffer): void {
  if (body.length >= LARGE_BYTES && body.length === body.buffer.byteLength) freeMemory(body)
}

function broken (what: string): RefitError {
  return new RefitError('BODY_BROKEN', `the body: ${what}`)
}
