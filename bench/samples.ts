import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { PLAIN_SAMPLING } from '../src/http/generation/plain-sampling.ts'
import { Sample } from '../src/http/generation/sample.ts'
import { KeptSamples } from '../src/http/samples/kept-samples.ts'
import { buildServer, createEngine, RefitClient } from '../src/index.ts'
import { packageRoot } from '../src/root.ts'
import { median } from './lib/baseline.ts'
import { measure } from './lib/measure.ts'
import { report } from './lib/table.ts'

// The cost of kept samples: the processor time of keeping one, beside that of generating one through /generate. The
// bundled model is so small that a step costs less than in any real use, and answers are short, so the share of keeping
// is as large as it gets. Whole runs with and without it differ by less than a shared machine's noise.
// usage: node dist/bench/samples.js

const ROUNDS = 15
const TOKENS = 16
const KEPT = 20_000
const engine = await createEngine(join(packageRoot, 'models/adder-base'), { threads: 1, maxTotalTokens: 32768 })
const app = await buildServer({ engine, port: 0, samplesMemory: 0 })
const client = new RefitClient(app.listeningOrigin)
const prompts = readFileSync(join(packageRoot, 'examples/adder/prompts.txt'), 'utf8').trim().split('\n').slice(0, 128)

const generating: number[] = []
const keeping: number[] = []
for (let round = -1; round < ROUNDS; round++) {
  const { cpuMs } = await measure(generate)
  const kept = await measure(keep)
  if (round < 0) continue
  generating.push(1000 * cpuMs / prompts.length)
  keeping.push(1000 * kept.cpuMs / KEPT)
}
const [one, more] = [median(generating), median(keeping)]
report('samples', [{
  figure: `keeping a sample of ${TOKENS} tokens and logprobs`,
  ours: `${more.toFixed(1)} us of processor time`,
  other: `${one.toFixed(0)} us, generating it in a batch of ${prompts.length}`,
  ratio: one / (one + more),
  goal: 0.99
}])
process.exit()

async function generate (): Promise<void> {
  const sampling = { max_new_tokens: TOKENS, ignore_eos: true }
  await client.generate({ text: prompts, sampling_params: sampling, return_logprob: true })
}

async function keep (): Promise<void> {
  const samples = new KeptSamples(16 * 2 ** 20, 'all')
  const promptIds = Int32Array.from({ length: 8 }, (_, i) => i)
  const sample = new Sample('', promptIds, 'v')
  const tokens = Array.from({ length: TOKENS }, (_, i) => i)
  sample.take({
    tokens,
    logprobs: tokens.map(token => [-token, token]),
    top: [],
    ids: [],
    input: null,
    text: '',
    weightVersion: 'v',
    promptTokens: promptIds.length,
    cachedTokens: 0,
    completionTokens: TOKENS,
    retractions: 0,
    seed: 1n,
    finish: { type: 'length', length: TOKENS }
  })
  const text = { stop: [], noStopTrim: false, skipSpecialTokens: true, spacesBetweenSpecialTokens: true }
  const plan = {
    names: [],
    promptIds,
    sampling: { ...PLAIN_SAMPLING, maxNewTokens: TOKENS, seed: 1n },
    logprobs: { startLen: null, top: 0, ids: [], raw: false },
    text,
    cacheSalt: undefined
  }
  for (let i = 0; i < KEPT; i++) {
    const rid = String(i)
    samples.keep(Object.assign(sample, { rid }), { ...plan, rid }, 1, 1)
  }
}
