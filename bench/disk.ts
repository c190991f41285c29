import { readdirSync, readFileSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { createEngine } from '../src/index.ts'
import { openDiskSource } from '../src/sources/disk.ts'
import { machine, median, transformers } from './lib/baseline.ts'
import { randomModel } from './lib/random-model.ts'
import { report } from './lib/table.ts'

// Loading and updating from disk (page cache) against plain pread, and against the same update done in Python; and what it costs in memory.
// usage: node dist/bench/disk.js

const THREADS = Number(process.env.REFIT_THREADS ?? 2)
const base = randomModel(1)
const next = randomModel(2)
const files = (folder: string): string[] => readdirSync(folder).filter(name => name.endsWith('.safetensors')).map(name => join(folder, name))
machine('pread', THREADS, ...files(base), ...files(next)) // both in the page cache from here on

const plain = machine('pread', THREADS, ...files(base))
const before = anonymousBytes()
const engine = await createEngine(base, { threads: THREADS, maxTotalTokens: 4096, modelRoots: [dirname(base)] })
const loaded = engine.loadReport
let peak = anonymousBytes()
const sampler = setInterval(() => { peak = Math.max(peak, anonymousBytes()) }, 5)

const turns: { ms: number, gbs: number, pread: number }[] = []
while (turns.length < 8) {
  const round = turns.length
  const start = performance.now()
  const source = await openDiskSource(round % 2 === 0 ? next : base, { roots: [dirname(base)] })
  const update = await engine.update()
  const { bytes } = await update.write(source)
  await update.commit({ version: String(round), flushCache: true })
  await source.close()
  const ms = performance.now() - start
  turns.push({ ms, gbs: bytes / ms / 1e6, pread: machine('pread', THREADS, ...files(base)).medianGBs })
}
clearInterval(sampler)
const { weightBytes, kvBytes } = engine.info
await engine.close()
const python = transformers(base, THREADS, 'update')

const updateMs = median(turns.map(turn => turn.ms))
const update = turns.sort((a, b) => a.gbs / a.pread - b.gbs / b.pread)[turns.length >> 1]!
const allowed = weightBytes + kvBytes + 250e6
report('disk', [
  { figure: `load of ${(loaded.bytes / 1e9).toFixed(2)} GB`, ours: `${loaded.gbPerSecond.toFixed(2)} GB/s`, other: `${plain.medianGBs} GB/s, plain ${THREADS}-thread pread into faulted memory`, ratio: loaded.gbPerSecond / plain.medianGBs, goal: 0.9 },
  { figure: 'update_weights_from_disk, whole call', ours: `${update.ms.toFixed(0)} ms, ${update.gbs.toFixed(2)} GB/s`, other: `${update.pread} GB/s, plain pread; median of ${turns.length} turns`, ratio: update.gbs / update.pread, goal: 0.9 },
  { figure: 'the same update in Python', ours: `${updateMs.toFixed(0)} ms`, other: `${python.update!.toFixed(0)} ms, safetensors + param.copy_`, ratio: python.update! / updateMs, goal: 1.5 },
  { figure: 'anonymous resident memory, also during updates', ours: `${(peak / 1e6).toFixed(0)} MB (${(before / 1e6).toFixed(0)} before the engine)`, other: `${(allowed / 1e6).toFixed(0)} MB = weights + KV + 250 MB`, ratio: allowed / peak, goal: 1 }
])

function anonymousBytes (): number {
  return Number(/^RssAnon:\s+(\d+) kB/m.exec(readFileSync('/proc/self/status', 'utf8'))![1]) * 1024
}
