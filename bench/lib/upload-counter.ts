import { once } from 'node:events'
import { createReadStream, createWriteStream, unlinkSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import type { Readable } from 'node:stream'
import { pipeline } from 'node:stream/promises'
import multipart from '@fastify/multipart'
import Fastify from 'fastify'
import type { FastifyRequest } from 'fastify'

// The baseline for uploads. It writes its address to its output. POST / only counts the bytes. /hold and /disk store
// the body in memory or on disk, as a usual handler does that needs the complete body.

const app = Fastify({ forceCloseConnections: true })
await app.register(multipart)
app.addContentTypeParser('application/octet-stream', (_request, _payload, done) => {
  done(null)
})
app.post('/', async request => ({ seen: await count(request) }))
app.post('/hold', async request => ({ seen: Buffer.concat(await keep(request)).length }))
app.post('/disk', async request => ({ seen: await throughDisk(request) }))
process.stdout.write(`${await app.listen({ port: 0, host: '127.0.0.1' })}\n`)

async function count (request: FastifyRequest): Promise<number> {
  let seen = 0
  const add = (chunk: Buffer): void => {
    seen += chunk.length
  }
  if (!request.isMultipart()) {
    request.raw.on('data', add)
    await once(request.raw, 'end')
    return seen
  }
  for await (const part of request.parts({ limits: { fileSize: Infinity } })) {
    if (part.type === 'file') await once(part.file.on('data', add), 'end')
  }
  return seen
}

/** The chunks of the body, or of a form's file. */
async function keep (request: FastifyRequest): Promise<Buffer[]> {
  const chunks: Buffer[] = []
  for await (const stream of bodies(request)) for await (const chunk of stream) chunks.push(chunk as Buffer)
  return chunks
}

async function throughDisk (request: FastifyRequest): Promise<number> {
  const path = join(tmpdir(), `refit-bench-upload-${process.pid}`)
  let seen = 0
  for await (const stream of bodies(request)) {
    await pipeline(stream, createWriteStream(path, { highWaterMark: 1 << 20 }))
    for await (const chunk of createReadStream(path, { highWaterMark: 1 << 20 })) seen += (chunk as Buffer).length
  }
  unlinkSync(path)
  return seen
}

async function* bodies (request: FastifyRequest): AsyncGenerator<Readable> {
  if (!request.isMultipart()) return yield request.raw
  for await (const part of request.parts({ limits: { fileSize: Infinity } })) if (part.type === 'file') yield part.file
}
