import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { buildServer, createEngine, RefitClient } from '../src/index.ts'
import { packageRoot } from '../src/root.ts'
import { median } from './lib/baseline.ts'
import { report } from './lib/table.ts'

// The cost of kept samples: tokens per second through /generate with and without them. The bundled model is so small
// that a step costs less than in any real use, and answers are short, so the share of keeping is as large as it gets.
// usage: node dist/bench/samples.js

const ROUNDS = 9
const TOKENS = 16
const engine = await createEngine(join(packageRoot, 'models/adder-base'), { threads: 1, maxTotalTokens: 32768 })
const off = await serve(0)
const on = await serve(16 * 2 ** 20)
const prompts = readFileSync(join(packageRoot, 'examples/adder/prompts.txt'), 'utf8').trim().split('\n').slice(0, 128)

// Alternates, because the machine's speed drifts.
const times = { off: [] as number[], on: [] as number[] }
for (let round = -1; round < ROUNDS; round++) {
  for (const [name, client] of [['off', off], ['on', on]] as const) {
    const began = performance.now()
    await client.generate({
      text: prompts,
      sampling_params: { max_new_tokens: TOKENS, ignore_eos: true },
      return_logprob: true
    })
    if (round >= 0) times[name].push(performance.now() - began)
  }
}
const perSecond = (ms: number): string => `${Math.round(prompts.length * TOKENS / ms * 1000)} tokens/s`
report('samples', [{
  figure: `decode, batch ${prompts.length}, with every sample kept`,
  ours: perSecond(median(times.on)),
  other: `${perSecond(median(times.off))}, none kept`,
  ratio: median(times.off) / median(times.on),
  goal: 0.99
}])
process.exit()

async function serve (samplesMemory: number): Promise<RefitClient> {
  const app = await buildServer({ engine, port: 0, samplesMemory, keepSamples: 'all' })
  return new RefitClient(app.listeningOrigin)
}
