import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { readdirSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { fileURLToPath } from 'node:url'
import multipart from '@fastify/multipart'
import Fastify from 'fastify'
import type { FastifyRequest } from 'fastify'
import { createEngine, createServer } from '../src/index.ts'
import { median } from './lib/baseline.ts'
import { randomModel } from './lib/random-model.ts'
import { report } from './lib/table.ts'
import type { Figure } from './lib/table.ts'

// Uploads of random weights on loopback, against a handler that only counts the bytes, read the same way; the sender is a process of its own.
// Whole calls, POST to reply. And what an upload of any size takes in memory, and whether the server answers others meanwhile.
// usage: node dist/bench/upload.js

const THREADS = Number(process.env.REFIT_THREADS ?? 2)
const ROUNDS = 9
const PATH = '/update_weights_from_tensor'
const folders = [randomModel(1), randomModel(2)]
const files = folders.map(folder => join(folder, readdirSync(folder).find(name => name.endsWith('.safetensors'))!))

const engine = await createEngine(folders[0]!, { threads: THREADS, maxTotalTokens: 4096 })
const app = await createServer({ engine, tokenizer: null, logger: false })
const url = await app.listen({ port: 0, host: '127.0.0.1' })
const counter = Fastify({ forceCloseConnections: true })
await counter.register(multipart)
counter.addContentTypeParser('application/octet-stream', (_request, _payload, done) => { done(null) })
counter.post('/', async request => ({ seen: await count(request) }))
const counting = await counter.listen({ port: 0, host: '127.0.0.1' })
const sender = spawn(process.execPath, [fileURLToPath(new URL(`./lib/upload-sender${import.meta.url.endsWith('.ts') ? '.ts' : '.js'}`, import.meta.url)), ...files], { stdio: ['pipe', 'pipe', 'inherit'] })
const lines = createInterface({ input: sender.stdout })[Symbol.asyncIterator]()

/** One upload of the two files in turns: all of it, or its first tensors. */
async function send (target: string, kind: 'bytes' | 'form', tensors: number): Promise<{ ms: number, bytes: number }> {
  sender.stdin.write(`${JSON.stringify({ url: target, kind, tensors, file: turn++ % 2 })}\n`)
  const { value, done } = await lines.next()
  if (done === true) throw new Error('the sender has ended')
  return JSON.parse(value) as { ms: number, bytes: number }
}

let turn = 0
const figures: Figure[] = []
const rows = [
  { name: 'octet-stream, written as it comes (mode=stream)', kind: 'bytes', query: '?mode=stream', tensors: 0, goal: 0.75 },
  { name: 'multipart, written as it comes (mode=stream)', kind: 'form', query: '?mode=stream', tensors: 0, goal: 0.85 },
  { name: 'octet-stream, held in memory', kind: 'bytes', query: '', tensors: 4, goal: 0.75 },
  { name: 'multipart, held in memory', kind: 'form', query: '', tensors: 4, goal: 0.85 },
  { name: 'octet-stream, spooled to disk', kind: 'bytes', query: '', tensors: 0, goal: 0.75 },
  { name: 'multipart, spooled to disk', kind: 'form', query: '', tensors: 0, goal: 0.85 }
] as const
const idle = resident()
let peak = idle
const sampler = setInterval(() => { peak = Math.max(peak, resident()) }, 5)
let slowest = 0
const prober = setInterval(() => {
  const start = performance.now()
  void fetch(`${url}/health`).then(() => { slowest = Math.max(slowest, performance.now() - start) })
}, 50)
for (const { name, kind, query, tensors, goal } of rows) {
  const ours: number[] = []
  const plain: number[] = []
  let size = 0
  for (let round = -1; round < ROUNDS; round++) {
    const [mine, theirs] = [await send(url + PATH + query, kind, tensors), await send(counting, kind, tensors)]
    // The first turn finds cold memory and cold code.
    if (round < 0) continue
    ours.push(mine.ms)
    plain.push(theirs.ms)
    size = mine.bytes
  }
  const [a, b] = [median(ours), median(plain)]
  figures.push({ figure: `${name}, ${(size / 1e9).toFixed(2)} GB`, ours: `${(size / a / 1e6).toFixed(2)} GB/s`, other: `${(size / b / 1e6).toFixed(2)} GB/s, bytes only counted; medians of ${ours.length} in turns`, ratio: b / a, goal })
}
clearInterval(sampler)
clearInterval(prober)
sender.stdin.end()
figures.push({ figure: 'resident memory that uploads add, at most', ours: `${((peak - idle) / 1e6).toFixed(0)} MB`, other: '300 MB allowed', ratio: 300e6 / (peak - idle), goal: 1 })
figures.push({ figure: 'slowest GET /health during uploads', ours: `${slowest.toFixed(0)} ms`, other: '250 ms allowed', ratio: 250 / slowest, goal: 1 })
await app.close()
await engine.close()
await counter.close()
report('upload', figures)

async function count (request: FastifyRequest): Promise<number> {
  let seen = 0
  const add = (chunk: Buffer): void => { seen += chunk.length }
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

/** Without the files of the page cache and the shared pages of libraries. */
function resident (): number {
  return Number(/^RssAnon:\s+(\d+) kB/m.exec(readFileSync('/proc/self/status', 'utf8'))![1]) * 1024
}
