import { spawn } from 'node:child_process'
import type { ChildProcess, StdioOptions } from 'node:child_process'
import { readdirSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { setTimeout as sleep } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import { createEngine, createServer } from '../src/index.ts'
import { median } from './lib/baseline.ts'
import { randomModel } from './lib/random-model.ts'
import { report } from './lib/table.ts'
import type { Figure } from './lib/table.ts'

// Uploads of random weights on loopback, against a handler that only counts the bytes, read the same way; the sender
// and that handler are separate processes, because in one heap each would wait for the other's garbage collection.
// Whole calls, POST to reply. Also the memory that an upload takes, and whether the server answers other requests
// meanwhile. usage: node dist/bench/upload.js [PART OF A ROW'S NAME [ROUNDS]]; only a run of all rows is kept

const THREADS = Number(process.env.REFIT_THREADS ?? 2)
const ROUNDS = Number(process.argv[3] ?? 9)
const PATH = '/update_weights_from_tensor'
const folders = [randomModel(1), randomModel(2)]
const files = folders.map(folder => join(folder, readdirSync(folder).find(name => name.endsWith('.safetensors'))!))

const engine = await createEngine(folders[0]!, { threads: THREADS, maxTotalTokens: 4096 })
const app = await createServer({ engine, tokenizer: null, logger: false })
const url = await app.listen({ port: 0, host: '127.0.0.1' })
const counter = child('upload-counter', ['ignore', 'pipe', 'inherit'], [])
const counting = (await createInterface({ input: counter.stdout! })[Symbol.asyncIterator]().next()).value as string
const sender = child('upload-sender', ['pipe', 'pipe', 'inherit'], files)
const lines = createInterface({ input: sender.stdout! })[Symbol.asyncIterator]()

/** Uploads of the two files alternate. Each sends the whole file, or its first tensors. */
async function send (target: string, kind: 'bytes' | 'form', tensors: number): Promise<{ ms: number, bytes: number }> {
  sender.stdin!.write(`${JSON.stringify({ url: target, kind, tensors, file: turn++ % 2 })}\n`)
  const { value, done } = await lines.next()
  if (done === true) throw new Error('the sender has ended')
  return JSON.parse(value) as { ms: number, bytes: number }
}

let turn = 0
const figures: Figure[] = []
const rows = [
  {
    name: 'octet-stream, written as it comes (mode=stream)',
    kind: 'bytes',
    query: '?mode=stream',
    tensors: 0,
    goal: 0.75,
    keeps: null
  },
  {
    name: 'multipart, written as it comes (mode=stream)',
    kind: 'form',
    query: '?mode=stream',
    tensors: 0,
    goal: 0.85,
    keeps: null
  },
  { name: 'octet-stream, held in memory', kind: 'bytes', query: '', tensors: 4, goal: 0.75, keeps: '/hold' },
  { name: 'multipart, held in memory', kind: 'form', query: '', tensors: 4, goal: 0.85, keeps: '/hold' },
  { name: 'octet-stream, spooled to disk', kind: 'bytes', query: '', tensors: 0, goal: 0.75, keeps: '/disk' },
  { name: 'multipart, spooled to disk', kind: 'form', query: '', tensors: 0, goal: 0.85, keeps: '/disk' }
] as const
const idle = resident()
let peak = idle
const sampler = setInterval(() => {
  peak = Math.max(peak, resident())
}, 5)
let slowest = 0
const probes = new AbortController()
const probing = probe(probes.signal)
for (const row of rows) await compare(row, '/', 'bytes only counted', row.goal)
clearInterval(sampler)
// A probe that runs while the server closes loses its connection.
probes.abort()
await probing
for (const row of rows) {
  if (row.keeps !== null) {
    await compare(
      row,
      row.keeps,
      row.keeps === '/hold'
        ? 'chunks kept and joined, used for nothing'
        : 'written to a file and read back by node:stream, used for nothing',
      1
    )
  }
}
sender.stdin!.end()
figures.push({
  figure: 'resident memory that uploads add, at most',
  ours: `${((peak - idle) / 1e6).toFixed(0)} MB`,
  other: '300 MB allowed',
  ratio: 300e6 / (peak - idle),
  goal: 1
})
figures.push({
  figure: 'slowest GET /health during uploads',
  ours: `${slowest.toFixed(0)} ms`,
  other: '250 ms allowed',
  ratio: 250 / slowest,
  goal: 1
})
await app.close()
await engine.close()
counter.kill()
if (process.argv[2] === undefined) report('upload', figures)
else console.table(figures)

/** Alternates between both. */
async function compare (
  { name, kind, query, tensors }: typeof rows[number],
  other: string,
  does: string,
  goal: number
): Promise<void> {
  if (!name.includes(process.argv[2] ?? '')) return
  const ours: number[] = []
  const theirs: number[] = []
  let size = 0
  for (let round = -1; round < ROUNDS; round++) {
    const [mine, plain] = [await send(url + PATH + query, kind, tensors), await send(counting + other, kind, tensors)]
    // In the first round memory and code are cold.
    if (round < 0) continue
    ours.push(mine.ms)
    theirs.push(plain.ms)
    size = mine.bytes
  }
  const [a, b] = [median(ours), median(theirs)]
  figures.push({
    figure: `${name}, ${(size / 1e9).toFixed(2)} GB`,
    ours: `${(size / a / 1e6).toFixed(2)} GB/s`,
    other: `${(size / b / 1e6).toFixed(2)} GB/s, ${does}; medians of ${ours.length} in turns`,
    ratio: b / a,
    goal
  })
}

/** A program beside this one. */
function child (name: string, stdio: StdioOptions, args: readonly string[]): ChildProcess {
  return spawn(process.execPath, [
    fileURLToPath(new URL(`./lib/${name}${import.meta.url.endsWith('.ts') ? '.ts' : '.js'}`, import.meta.url)),
    ...args
  ], { stdio })
}

/** Sends requests until the signal, and records the slowest reply. */
async function probe (signal: AbortSignal): Promise<void> {
  while (!signal.aborted) {
    const start = performance.now()
    const reply = await fetch(`${url}/health`)
    await reply.arrayBuffer()
    slowest = Math.max(slowest, performance.now() - start)
    await sleep(50, undefined, { signal }).catch(() => {})
  }
}

/** Resident memory without files of the page cache and shared pages of libraries. */
function resident (): number {
  return Number(/^RssAnon:\s+(\d+) kB/m.exec(readFileSync('/proc/self/status', 'utf8'))![1]) * 1024
}
