import { readdirSync, readFileSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { setTimeout } from 'node:timers/promises'
import { createEngine } from '../src/index.ts'
import { openDiskSource } from '../src/sources/disk/disk.ts'
import { checkPython, machine, median, plainReads, pythonUpdates } from './lib/baseline.ts'
import { randomModel } from './lib/random-model.ts'
import { report } from './lib/table.ts'

// Loading and updating from disk (page cache) against plain pread, and against the same update done in Python; and what
// it costs in memory. usage: node dist/bench/disk.js

const rivals = checkPython()
const THREADS = Number(process.env.REFIT_THREADS ?? 2)
const base = randomModel(1)
const next = randomModel(2)
const files = (folder: string): string[] =>
  readdirSync(folder).filter(name => name.endsWith('.safetensors')).map(name => join(folder, name))
machine('pread', THREADS, ...files(base), ...files(next)) // From here on both are in the page cache.

// Loads alternate with plain reads. Each load makes an engine of its own.
const loads: { gbs: number, pread: number }[] = []
while (loads.length < 5) {
  const fresh = await createEngine(base, { threads: THREADS, maxTotalTokens: 4096 })
  loads.push({ gbs: fresh.loadReport.gbPerSecond, pread: machine('pread', THREADS, ...files(base)).medianGBs })
  await fresh.close()
}

const before = anonymousBytes()
const engine = await createEngine(base, { threads: THREADS, maxTotalTokens: 4096, modelRoots: [dirname(base)] })
let peak = anonymousBytes()
const sampler = setInterval(() => {
  peak = Math.max(peak, anonymousBytes())
}, 5)

// refit, Python and a plain read of the same file alternate, because the machine's speed drifts and each run changes
// the caches for the next one.
const python = await pythonUpdates(base, THREADS)
const plain = await plainReads(files(base)[0]!, THREADS)
const ROUNDS = 21
const updates: number[] = []
const pythons: number[] = []
const reads: number[] = []
let bytes = 0
for (let round = -2; round < ROUNDS; round++) {
  const folder = round % 2 === 0 ? next : base
  const start = performance.now()
  const source = await openDiskSource(folder, { roots: [dirname(base)] })
  const update = await engine.update()
  const written = await update.write(source)
  await update.commit({ version: String(round), flushCache: true })
  await source.close()
  const ms = [performance.now() - start, await python.turn(folder)]
  await setTimeout(50) // torch's threads spin for a while after their work.
  ms.push(await plain.turn(files(folder)[0]!))
  if (round < 0) continue // warms up
  for (const [i, all] of [updates, pythons, reads].entries()) all.push(ms[i]!)
  bytes = written.bytes
}
clearInterval(sampler)
const { weightBytes } = engine.info
await engine.close()
python.end()
plain.end()

const updateMs = median(updates)
const pythonMs = median(pythons)
const updateGBs = bytes / updateMs / 1e6
const pread = bytes / median(reads) / 1e6
const load = loads.sort((a, b) => a.gbs / a.pread - b.gbs / b.pread)[loads.length >> 1]!
// Nothing was generated, so no page of the KV cache has been touched.
const allowed = weightBytes + 250e6
report('disk', [
  {
    figure: `load of ${(bytes / 1e9).toFixed(2)} GB, once memory is there`,
    ours: `${load.gbs.toFixed(2)} GB/s`,
    other: `${load.pread} GB/s, plain ${THREADS}-thread pread into faulted memory; median of ${loads.length} turns`,
    ratio: load.gbs / load.pread,
    goal: 0.9
  },
  {
    figure: 'update_weights_from_disk, whole call',
    ours: `${updateMs.toFixed(0)} ms, ${updateGBs.toFixed(2)} GB/s`,
    other: `${
      pread.toFixed(2)
    } GB/s, plain ${THREADS}-thread pread of the same file; medians of ${ROUNDS} each in turns`,
    ratio: updateGBs / pread,
    goal: 0.9
  },
  {
    figure: 'the same update in Python',
    ours: `${updateMs.toFixed(0)} ms`,
    other: `${pythonMs.toFixed(0)} ms, safetensors + param.copy_; medians of ${ROUNDS} each in turns`,
    ratio: pythonMs / updateMs,
    goal: 1.5
  },
  {
    figure: 'anonymous resident memory, also during updates',
    ours: `${(peak / 1e6).toFixed(0)} MB (${(before / 1e6).toFixed(0)} before the engine)`,
    other: `${(allowed / 1e6).toFixed(0)} MB = weights + 250 MB`,
    ratio: allowed / peak,
    goal: 1
  }
], rivals)

function anonymousBytes (): number {
  return Number(/^RssAnon:\s+(\d+) kB/m.exec(readFileSync('/proc/self/status', 'utf8'))![1]) * 1024
}
