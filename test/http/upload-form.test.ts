import { once } from 'node:events'
import { IncomingMessage, request as send } from 'node:http'
import { createConnection, Socket } from 'node:net'
import Fastify from 'fastify'
import fc from 'fast-check'
import t from 'tap'
import type { Test } from 'tap'
import { errorHandler } from '../../src/http/error-reply.ts'
import { installFormParser } from '../../src/http/upload/form-parser.ts'
import { readForm } from '../../src/http/upload/upload-form.ts'
import { dropRest, pump } from '../../src/http/upload/upload-pump.ts'
import { freeChunk } from '../../src/native/host-memory.ts'
import { until } from '../helpers/route-app.ts'

interface Part {
  name: string
  file: string | null
  bytes: Buffer
}

interface ReaderOptions {
  prepare?: (raw: IncomingMessage) => Promise<unknown>
  /** Every second chunk waits for this promise; by default for a turn of the event loop. */
  wait?: () => Promise<void>
}

/** A route that records the fields and files that arrive, and the outcomes of its calls. */
async function reader (t: Test, {
  prepare = async () => {},
  wait = async () =>
    await new Promise<void>(resolve => {
      setImmediate(resolve)
    })
}: ReaderOptions = {}): Promise<{ port: number, parts: Part[], outcomes: unknown[] }> {
  const app = Fastify({ forceCloseConnections: true, bodyLimit: 10 })
  const parts: Part[] = []
  const outcomes: unknown[] = []
  app.removeAllContentTypeParsers()
  await installFormParser(app)
  app.setErrorHandler(errorHandler)
  app.post('/', async request => {
    await prepare(request.raw)
    parts.length = 0
    let open = false
    const idle = (): void => {
      if (open) throw new Error('a part came before the one before it had ended')
    }
    try {
      await readForm(request, {
        stallMs: 60_000,
        signal: new AbortController().signal,
        broke: () => {},
        spent: freeChunk,
        field: (name, value) => {
          idle()
          parts.push({ name, file: null, bytes: Buffer.from(String(value)) })
        },
        file: file => {
          idle()
          open = true
          const chunks: Uint8Array[] = []
          let busy = false
          return {
            take: chunk => {
              if (busy) throw new Error('a chunk came while the one before it was on its way')
              chunks.push(Buffer.from(chunk))
              if (chunks.length % 2 === 1) return undefined
              busy = true
              return wait().then(() => {
                busy = false
              })
            },
            end: async () => {
              open = false
              parts.push({ name: '', file, bytes: Buffer.concat(chunks) })
            }
          }
        }
      })
      outcomes.push(null)
      return { parts: parts.length }
    } catch (error) {
      outcomes.push(error)
      dropRest(request.raw)
      throw error
    }
  })
  t.teardown(async () => await app.close())
  return { port: Number(new URL(await app.listen({ port: 0, host: '127.0.0.1' })).port), parts, outcomes }
}

const BOUNDARY = 'a-b'
function encode (parts: Part[], end = '--\r\n'): Buffer {
  const each = parts.flatMap(({ name, file, bytes }) => [
    Buffer.from(
      `--${BOUNDARY}\r\nContent-Disposition: form-data; name="${name}"${
        file === null ? '' : `; filename="${file}"\r\nContent-Type: application/octet-stream`
      }\r\n\r\n`
    ),
    bytes,
    Buffer.from('\r\n')
  ])
  return Buffer.concat([...each, Buffer.from(`--${BOUNDARY}${end}`)])
}

async function post (port: number, pieces: Buffer[]): Promise<{ status: number, body: any }> {
  const request = send({
    port,
    host: '127.0.0.1',
    method: 'POST',
    headers: { 'content-type': `multipart/form-data; boundary=${BOUNDARY}` }
  })
  for (const piece of pieces) {
    await new Promise(resolve => {
      request.write(piece, resolve)
    })
  }
  request.end()
  const [response] = await once(request, 'response') as [IncomingMessage]
  let text = ''
  for await (const chunk of response) text += String(chunk)
  return { status: response.statusCode!, body: JSON.parse(text) }
}

t.test('fields and files of a form are read in sequence and whole, in any order, from any chunks', async t => {
  const { port, parts } = await reader(t)
  const bytes = fc.oneof(fc.constantFrom(0, 1, 16_384, 65_536, 200_000, 1_200_000), fc.nat(40_000))
  const part = fc.oneof(
    fc.record({ file: fc.constant(null), size: fc.nat(30_000) }),
    fc.record({ file: fc.stringMatching(/^[a-z]{1,9}\.safetensors$/), size: bytes })
  )
  await fc.assert(
    fc.asyncProperty(
      fc.array(part, { minLength: 1, maxLength: 8 }),
      fc.array(fc.integer({ min: 1, max: 70_000 }), { maxLength: 4 }),
      fc.integer({ min: 1, max: 250 }),
      fc.boolean(),
      async (plan, cuts, seed, epilogue) => {
        const wanted = plan.map(({ file, size }, i): Part => ({
          name: file === null ? `field${i}` : '',
          file,
          bytes: Buffer.from(
            file === null
              ? 'x'.repeat(size)
              : Uint8Array.from({ length: size }, (_, at) => (at * seed + i + (at >> 8)) & 0xff)
          )
        }))
        const body = encode(wanted, epilogue ? `--\r\n${'behind it '.repeat(9000)}` : undefined)
        const pieces: Buffer[] = []
        let at = 0
        for (const cut of cuts) pieces.push(body.subarray(at, at += cut))
        pieces.push(body.subarray(at))
        const reply = await post(port, pieces.filter(({ length }) => length > 0))
        if (reply.status !== 200) throw new Error(JSON.stringify(reply))
        if (parts.length !== wanted.length) throw new Error(`${parts.length} parts of ${wanted.length}`)
        for (const [i, { name, file, bytes }] of wanted.entries()) {
          const got = parts[i]!
          if (got.name !== name || got.file !== file || !got.bytes.equals(bytes)) throw new Error(`part ${i} differs`)
        }
      }
    ),
    { numRuns: 150 }
  )
})

t.test('a truncated form is refused, and one whose client disconnects is aborted', async t => {
  const { port, outcomes } = await reader(t)
  const whole = encode([{ name: 'a', file: null, bytes: Buffer.from('1') }, {
    name: '',
    file: 'f',
    bytes: Buffer.alloc(40, 7)
  }, { name: 'b', file: null, bytes: Buffer.from('2') }])
  const end = whole.length - 2
  for (let cut = 1; cut < end; cut++) {
    const { status, body } = await post(port, [whole.subarray(0, cut)])
    t.same([status, body.error.code], [400, 'BODY_BROKEN'], `ends after ${cut}`)
  }
  t.equal((await post(port, [whole.subarray(0, end)])).status, 200)
  outcomes.length = 0
  for (let cut = 0; cut < whole.length; cut += 3) {
    const socket = createConnection(port, '127.0.0.1')
    socket.on('error', () => {})
    socket.write(
      `POST / HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=${BOUNDARY}\r\n` +
        `content-length: ${whole.length}\r\n\r\n`
    )
    await new Promise(resolve => {
      socket.write(whole.subarray(0, cut), resolve)
    })
    await new Promise(resolve => setTimeout(resolve, cut % 2 * 3))
    socket.destroy()
  }
  // A client that disconnects before its request was read leaves no outcome.
  await until(() => outcomes.length >= whole.length / 6)
  t.ok(outcomes.every(outcome => (outcome as { code?: string } | null)?.code === 'BODY_BROKEN'))
})

t.test('a client that disconnects before its body is read is noticed at once', async t => {
  const gone = new IncomingMessage(new Socket())
  gone.destroy()
  await once(gone, 'close')
  await t.rejects(
    pump(gone, {
      take: () => undefined,
      stallMs: 60_000,
      broke: () => {},
      spent: freeChunk,
      signal: new AbortController().signal
    }),
    { code: 'BODY_BROKEN' }
  )
  const { port, outcomes } = await reader(t, {
    prepare: async raw => {
      const closed = once(raw, 'close').catch(() => {})
      socket.destroy()
      await closed
    }
  })
  const socket = createConnection(port, '127.0.0.1')
  socket.write(
    `POST / HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=${BOUNDARY}\r\n` +
      `content-length: 1000\r\n\r\n--${BOUNDARY}`
  )
  await until(() => outcomes.length === 1)
  t.match(outcomes[0], { code: 'BODY_BROKEN', message: /broke off after 0 bytes of 1000/ })
})

t.test('while a chunk is processed, only a few buffers are read, from one large file or many small ones', async t => {
  for (const sizes of [[48 << 20], [200_000, ...Array.from({ length: 96 }, () => 500_000)]]) {
    let release = (): void => {}
    const gate = new Promise<void>(resolve => {
      release = resolve
    })
    const raws: IncomingMessage[] = []
    let isHeld = false
    const { port, parts } = await reader(t, {
      prepare: async raw => {
        raws.push(raw)
      },
      wait: async () => {
        isHeld = true
        await gate
      }
    })
    const body = encode(sizes.map((size, i) => ({ name: '', file: `f${i}`, bytes: Buffer.alloc(size, i) })))
    const reply = post(port, [body])
    await until(() => isHeld)
    let read = -1
    for (let now = 0; now !== read; now = raws[0]!.socket.bytesRead) {
      read = now
      await new Promise(resolve => setTimeout(resolve, 100))
    }
    t.ok(read < 8 << 20, `${read} bytes of ${body.length}`)
    release()
    t.equal((await reply).status, 200)
    t.same(parts.map(({ bytes }) => bytes.length), sizes)
  }
})
