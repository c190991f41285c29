import { cpSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, readlinkSync, rmSync } from 'node:fs'
import { request } from 'node:http'
import type { ClientRequest, OutgoingHttpHeaders } from 'node:http'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import type { FastifyInstance } from 'fastify'
import type { Test } from 'tap'
import { createEngine } from '../../src/app/create-engine.ts'
import type { LocalEngine } from '../../src/engine/local-engine.ts'
import { packageRoot } from '../../src/root.ts'
import { createServer } from '../../src/app/server.ts'
import type { ServerOptions } from '../../src/app/server.ts'
import { headerLength, parseHeader } from '../../src/wire/safetensors/header.ts'
import type { SafetensorsTensor } from '../../src/wire/safetensors/header.ts'
import { eventually } from './eventually.ts'

export const PATH = '/update_weights_from_tensor'

export interface Reply {
  status: number
  body: any
}

export interface UploadServer {
  url: string
  app: FastifyInstance
  engine: LocalEngine
  /** Folder for spooled uploads. */
  spool: string
  /** The file of a bundled model. */
  file: (model: 'adder' | 'adder-base') => Buffer
  checksums: () => Promise<unknown>
  generate: () => Promise<Reply>
  /** Sends bytes as octet-stream. */
  send: (bytes: Uint8Array, query?: string) => Promise<Reply>
  /** The same, repeated until it is accepted: on a slow machine a sender can look stalled with a short deadline. */
  sendUntilTaken: (bytes: Uint8Array, query?: string) => Promise<Reply>
  form: (parts: FormParts, query?: string) => Promise<Reply>
  /** Throws if memory, descriptors or files of uploads are left. */
  idle: () => Promise<void>
}

/** Fields, and files with their names. */
export type FormParts =
  (readonly [name: string, value: string] | readonly [name: string, bytes: Uint8Array, filename: string])[]

export interface UploadEngine {
  tp?: number
  enableLora?: boolean
  dtype?: 'auto' | 'bfloat16' | 'float32'
  shadowWeights?: boolean
}

/** A server over the adder's base, which an upload of the adder changes. */
export async function uploadServer (
  t: Test,
  { tp = 1, enableLora = false, dtype = 'auto', shadowWeights = false, ...options }:
    & Partial<ServerOptions>
    & UploadEngine = {}
): Promise<UploadServer> {
  const folder = mkdtempSync(join(tmpdir(), 'refit-upload-test-'))
  const spool = options.uploadFolder ?? join(folder, 'spool')
  mkdirSync(spool, { recursive: true })
  for (const model of ['adder', 'adder-base']) {
    cpSync(join(packageRoot, 'models', model), join(folder, model), { recursive: true })
  }
  const engine = await createEngine(join(folder, 'adder-base'), {
    threads: 1,
    tp,
    maxTotalTokens: 8192,
    enableLora,
    dtype,
    shadowWeights
  })
  const app = await createServer({
    engine,
    modelRoots: [folder],
    closeGraceMs: 500,
    uploadFolder: spool,
    warmUp: false,
    ...options
  })
  const url = await app.listen({ host: '127.0.0.1', port: 0 })
  t.teardown(async () => {
    await app.close()
    await engine.close()
    rmSync(folder, { recursive: true })
  })
  const call = async (path: string, init: RequestInit): Promise<Reply> => {
    const reply = await fetch(url + path, init)
    return { status: reply.status, body: await reply.json() }
  }
  const send = async (bytes: Uint8Array, query = ''): Promise<Reply> =>
    await call(PATH + query, {
      method: 'POST',
      headers: { 'content-type': 'application/octet-stream' },
      body: bytes as never
    })
  return {
    url,
    app,
    engine,
    spool,
    file: model => readFileSync(join(folder, model, 'model.safetensors')),
    checksums: async () => (await engine.checksums()).tensors,
    generate: async () =>
      await call('/generate', {
        method: 'POST',
        headers: { 'content-type': 'application/json' },
        body: JSON.stringify({ text: '12+34=', sampling_params: { max_new_tokens: 4, temperature: 0 } })
      }),
    send,
    sendUntilTaken: async (bytes, query) =>
      await eventually(
        async () => await send(bytes, query).catch((error: Error): Reply => ({ status: 0, body: error })),
        ({ status }) => status === 200
      ),
    form: async (parts, query = '') => {
      const form = new FormData()
      for (const [name, value, filename] of parts) {
        if (typeof value === 'string') form.append(name, value)
        else form.append(name, new Blob([value as never]), filename)
      }
      return await call(PATH + query, { method: 'POST', body: form })
    },
    idle: async () => {
      const end = performance.now() + 60_000
      for (;;) {
        const left = await remains()
        if (left === '') return
        if (performance.now() > end) throw new Error(`uploads left ${left}`)
        await new Promise(resolve => setTimeout(resolve, 10))
      }
    }
  }

  async function remains (): Promise<string> {
    const metrics = await (await fetch(`${url}/metrics`)).text()
    const live = Number(/^refit:upload_staging_bytes\{.*\} (\d+)$/m.exec(metrics)?.[1])
    const files = readdirSync(spool)
    const open = readdirSync('/proc/self/fd').filter(fd => {
      try {
        return readlinkSync(`/proc/self/fd/${fd}`).includes('refit-upload-') &&
          !readlinkSync(`/proc/self/fd/${fd}`).includes('-test-')
      } catch {
        return false
      }
    })
    return live === 0 && files.length === 0 && open.length === 0
      ? ''
      : `${live} bytes, ${files.length} files, ${open.length} descriptors`
  }
}

/** The tensors of a file, and the offset of its data. */
export function layout (file: Buffer): { dataStart: number, tensors: SafetensorsTensor[] } {
  const length = headerLength(file, file.length, 'file')
  return { dataStart: 8 + length, tensors: parseHeader(file.subarray(8, 8 + length), file.length, 'file').tensors }
}

/** A request whose body the caller writes. Resolves to the reply, or null if the connection ends without one. */
export function post (
  url: string,
  headers: OutgoingHttpHeaders
): { request: ClientRequest, reply: Promise<Reply | null> } {
  const sending = request(url, { method: 'POST', headers, agent: false })
  const reply = new Promise<Reply | null>(resolve => {
    sending.on('response', response => {
      let text = ''
      response.on('data', chunk => {
        text += String(chunk)
      })
      response.on('end', () => {
        resolve({ status: response.statusCode!, body: JSON.parse(text) })
      })
      response.on('error', () => {
        resolve(null)
      })
    })
    sending.on('error', () => {
      resolve(null)
    })
  })
  return { request: sending, reply }
}
