import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { createEngine } from '../src/index.ts'
import { openDiskSource } from '../src/sources/disk/disk.ts'
import type { EngineOptions, GenerateRequest } from '../src/index.ts'
import type { LocalEngine } from '../src/engine/local-engine.ts'
import { randomModel } from './lib/random-model.ts'
import { report } from './lib/table.ts'
import type { Figure } from './lib/table.ts'
import { packageRoot } from '../src/root.ts'
import { PLAIN_SAMPLING } from '../src/http/generation/plain-sampling.ts'

// Generation with guesses (--speculative siblings) against the same without, in one run: outputs that repeat exactly
// and not at all, on a model of 1.1 GB with random weights; and, with REFIT_BENCH_BYTES, three policies one after
// another on a small model that was trained on text (bench/python/byte_models.py), whose outputs repeat in parts.
// usage: [REFIT_BENCH_BYTES=FOLDER] node dist/bench/speculation.js

const THREADS = Number(process.env.REFIT_THREADS ?? 2)
let requests = 0

interface Run {
  ms: number
  steps: number
  tokens: number
  drafted: number
  accepted: number
}

async function run (engine: LocalEngine, list: readonly GenerateRequest[]): Promise<Run> {
  const before = engine.stats
  const began = performance.now()
  await Promise.all(list.map(async request => {
    for await (const event of engine.generate(request)) void event
  }))
  const after = engine.stats
  return {
    ms: performance.now() - began,
    steps: after.steps - before.steps,
    tokens: after.generationTokens - before.generationTokens,
    drafted: after.draftTokens - before.draftTokens,
    accepted: after.acceptedTokens - before.acceptedTokens
  }
}

/** The run with the median time. */
function middle (runs: Run[]): Run {
  return runs.sort((a, b) => a.ms - b.ms)[runs.length >> 1]!
}

function request (inputIds: Int32Array, seed: number, tokens: number): GenerateRequest {
  return {
    rid: `bench-${requests++}`,
    inputIds,
    sampling: { ...PLAIN_SAMPLING, maxNewTokens: tokens, temperature: 1, seed: BigInt(seed), ignoreEos: true },
    logprobs: null
  }
}

/** Two engines of one model, with guesses and without. */
async function both (folder: string, options: EngineOptions): Promise<[guessing: LocalEngine, plain: LocalEngine]> {
  const common = { threads: THREADS, ...options }
  return [await createEngine(folder, { ...common, speculative: 'siblings' }), await createEngine(folder, common)]
}

function figure (name: string, ours: Run, other: Run, goal: number): Figure {
  const perSecond = ({ tokens, ms }: Run): string => `${(1000 * tokens / ms).toFixed(0)} tok/s`
  return {
    figure: name,
    ours: `${perSecond(ours)}, ${ours.accepted} of ${ours.drafted} guesses right, ${ours.steps} steps`,
    other: `${perSecond(other)}, ${other.steps} steps, without guesses`,
    ratio: other.ms / ours.ms,
    goal
  }
}

/** Outputs that repeat exactly, and that do not repeat at all. */
async function extremes (): Promise<Figure[]> {
  const [guessing, plain] = await both(randomModel(), { maxTotalTokens: 16384, contextLength: 1024 })
  const prompt = (index: number): Int32Array =>
    Int32Array.from({ length: 32 }, (_, i) => (index * 7907 + i * 104729) % 32000)
  const figures: Figure[] = []
  for (const batch of [1, 4, 8]) {
    const list = (): GenerateRequest[] => Array.from({ length: batch }, (_, i) => request(prompt(batch), i, 64))
    await run(guessing, list())
    await run(plain, list())
    const name = `the same outputs again, ${batch} at once`
    figures.push(figure(name, await run(guessing, list()), await run(plain, list()), 1))
  }
  const fresh = (): GenerateRequest[] => Array.from({ length: 4 }, () => request(prompt(1000 + requests), requests, 64))
  // Alternately, because the machine's speed drifts.
  const [ours, other]: Run[][] = [[], []]
  for (let round = 0; round < 5; round++) {
    ours!.push(await run(guessing, fresh()))
    other!.push(await run(plain, fresh()))
  }
  figures.push(figure('no output repeats, 4 at once', middle(ours!), middle(other!), 0.95))
  await guessing.close()
  await plain.close()
  return figures
}

/** Eight samples of each of 16 prompts, with three policies one after another; figures of the last. */
async function policies (folder: string): Promise<Figure[]> {
  const text = readFileSync(join(packageRoot, 'docs/updates.md'))
  const prompts = Array.from({ length: 16 }, (_, i) => Int32Array.from(text.subarray(i * 400, i * 400 + 96)))
  const figures: Figure[] = []
  for (const prompted of [1, 4]) {
    const engines = await both(join(folder, '0'), { maxTotalTokens: 65536, contextLength: 512 })
    const sums = engines.map((): Run => ({ ms: 0, steps: 0, tokens: 0, drafted: 0, accepted: 0 }))
    for (const policy of [0, 1, 2]) {
      if (policy > 0) { for (const engine of engines) await load(engine, join(folder, String(policy))) }
      for (let p = 0; p < prompts.length; p += prompted) {
        // Alternately, because the machine's speed drifts.
        for (const [e, engine] of engines.entries()) {
          const list = prompts.slice(p, p + prompted).flatMap((ids, i) =>
            Array.from({ length: 8 }, (_, sample) => request(ids, 1000 * policy + 8 * (p + i) + sample, 256))
          )
          const one = await run(engine, list)
          if (policy === 2) { for (const key of Object.keys(one) as (keyof Run)[]) sums[e]![key] += one[key] }
        }
      }
    }
    figures.push(figure(`trained on text, third policy, ${8 * prompted} at once`, sums[0]!, sums[1]!, 1))
    for (const engine of engines) await engine.close()
  }
  return figures
}

async function load (engine: LocalEngine, folder: string): Promise<void> {
  const source = await openDiskSource(folder, { roots: [folder] })
  const update = await engine.update()
  await update.write(source)
  await update.commit({ requireAll: true })
  await source.close()
}

const bytes = process.env.REFIT_BENCH_BYTES
report('speculation', [...await extremes(), ...bytes === undefined ? [] : await policies(bytes)])
