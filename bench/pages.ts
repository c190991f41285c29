import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { createEngine, createServer } from '../src/index.ts'
import { PLAIN_SAMPLING } from '../src/http/generation/plain-sampling.ts'
import { packageRoot } from '../src/root.ts'
import { measure, ratioOf, spread } from './lib/measure.ts'
import type { Turn } from './lib/measure.ts'
import { report } from './lib/table.ts'

// Decode at batch 16 while 200 pages follow the event stream, against the same with none, in turns. The model is the
// adder: its steps of about a millisecond leave the least room. The pages are in another process.
// usage: node dist/bench/pages.js

const PAGES = 200
const TURNS = 9
const BATCH = 16
const TOKENS = 500

const model = join(packageRoot, 'models/adder')
const engine = await createEngine(model, { threads: 1, maxTotalTokens: 1 << 15 })
const app = await createServer({ engine, ui: true, closeGraceMs: 100 })
const url = await app.listen({ port: 0, host: '127.0.0.1' })
const readers = join(dirname(fileURLToPath(import.meta.url)), 'lib', 'page-readers.js')
let requests = 0

await decode()
const turns: Turn[] = []
while (turns.length < TURNS) {
  const other = await measure(decode)
  const close = await openPages()
  const ours = await measure(decode)
  await close()
  turns.push({ ours, other })
}
await app.close()
await engine.close()

const steps = (ms: number): string => `${(ms / TOKENS).toFixed(3)} ms/step`
const middle = turns.sort((a, b) => a.other.ms / a.ours.ms - b.other.ms / b.ours.ms)[turns.length >> 1]!
report('pages', [{
  figure: `decode, batch ${BATCH}, ${PAGES} open pages (${spread(turns)})`,
  ours: steps(middle.ours.ms),
  other: `${steps(middle.other.ms)}, no page`,
  ratio: ratioOf(turns),
  goal: 0.97
}])

async function openPages (): Promise<() => Promise<void>> {
  const child = spawn(process.execPath, [readers, url, String(PAGES)], { stdio: ['ignore', 'pipe', 'inherit'] })
  await once(child.stdout, 'data')
  return async () => {
    child.kill()
    await once(child, 'exit')
  }
}

async function decode (): Promise<void> {
  await Promise.all(Array.from({ length: BATCH }, async () => {
    const id = requests++
    const inputIds = Int32Array.from([10 + id % 10, 11, 12, 13])
    const sampling = { ...PLAIN_SAMPLING, maxNewTokens: TOKENS, ignoreEos: true, seed: 1n }
    const events = engine.generate({ rid: `pages-${id}`, inputIds, sampling, logprobs: null })[Symbol.asyncIterator]()
    while ((await events.next()).done !== true);
  }))
}
