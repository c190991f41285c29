import type { Test } from 'tap'
import { cpSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createEngine } from '../../src/app/create-engine.ts'
import type { EngineOptions } from '../../src/app/create-engine.ts'
import type { LocalEngine } from '../../src/engine/local-engine.ts'
import { native } from '../../src/native/load-addon.ts'
import { packageRoot } from '../../src/root.ts'
import { createServer } from '../../src/app/server.ts'
import { headerLength, parseHeader } from '../../src/wire/safetensors/header.ts'
import { encodeSafetensors } from '../../src/wire/safetensors/encode.ts'

/** Number of parts of a checkpoint. */
export const BUCKETS = 3
export const MODELS = { base: 'adder-base', trained: 'adder' }

export interface Reply {
  status: number
  body: any
}
export interface Server {
  app: Awaited<ReturnType<typeof createServer>>
  engine: LocalEngine
  folder: string
  names: string[]
  post: (path: string, body?: unknown) => Promise<Reply>
  get: (path: string) => Promise<Reply>
  ok: (path: string, body?: unknown) => Promise<any>
  /** Bucket `index` of a model, as one update. */
  bucket: (model: keyof typeof MODELS, index: number, more?: object) => Promise<Reply>
}

export function tensorsOf (folder: string) {
  const bytes = readFileSync(join(folder, 'model.safetensors'))
  const length = headerLength(bytes, bytes.length, 'model')
  return parseHeader(bytes.subarray(8, 8 + length), bytes.length, 'model').tensors.map((
    { name, dtype, shape, begin, end }
  ) => ({ name, dtype, shape: [...shape], data: bytes.subarray(begin, end) }))
}

/** A server with a real engine, for updates of many requests. */
export async function serve (t: Test, options: EngineOptions = {}): Promise<Server> {
  const folder = mkdtempSync(join(tmpdir(), 'refit-transactions-'))
  let names: string[] = []
  for (const [model, source] of Object.entries(MODELS)) {
    cpSync(join(packageRoot, 'models', source), join(folder, model), { recursive: true })
    const tensors = tensorsOf(join(folder, model))
    names = tensors.map(({ name }) => name)
    for (let index = 0; index < BUCKETS; index++) {
      mkdirSync(join(folder, `${model}-${index}`))
      writeFileSync(
        join(folder, `${model}-${index}/model.safetensors`),
        encodeSafetensors(tensors.filter((_, i) => i % BUCKETS === index))
      )
    }
  }
  const engine = await createEngine(join(folder, 'base'), { threads: 1, maxTotalTokens: 8192, ...options })
  const app = await createServer({ engine, modelRoots: [folder], closeGraceMs: 500, warmUp: false })
  const url = await app.listen({ host: '127.0.0.1', port: 0 })
  t.teardown(async () => {
    native().armFault!(null)
    await app.close()
    await engine.close()
    rmSync(folder, { recursive: true })
  })
  const call = async (path: string, init: RequestInit = {}): Promise<Reply> => {
    const reply = await fetch(url + path, init)
    const text = await reply.text()
    return {
      status: reply.status,
      body: /json/.test(reply.headers.get('content-type') ?? '') ? JSON.parse(text) : text
    }
  }
  const post = async (path: string, body: unknown = {}): Promise<Reply> =>
    await call(path, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(body) })
  const ok = async (path: string, body?: unknown): Promise<any> => {
    const reply = await post(path, body)
    if (reply.status !== 200) throw new Error(`${path} answered ${reply.status}: ${JSON.stringify(reply.body)}`)
    return reply.body
  }
  const bucket = async (model: keyof typeof MODELS, index: number, more: object = {}): Promise<Reply> =>
    await post('/update_weights_from_disk', { model_path: join(folder, `${model}-${index}`), ...more })
  return { app, engine, folder, names, post, get: call, ok, bucket }
}

export async function until (condition: () => boolean | Promise<boolean>): Promise<void> {
  while (!await condition()) await new Promise(resolve => setTimeout(resolve, 2))
}

export const PROMPTS = readFileSync(join(packageRoot, 'examples/adder/prompts.txt'), 'utf8')
  .trim()
  .split('\n')
  .slice(0, 16)
  .map(line => line.split('=')[0]! + '=')
/** A request that runs, in slow steps, until it is aborted. */
export const ENDLESS = {
  input_ids: [49, 43, 49, 61],
  rid: 'endless',
  sampling_params: { max_new_tokens: 2000, ignore_eos: true, n: 3 }
}
