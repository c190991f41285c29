import { createEngine } from '../src/index.ts'
import type { GenerateRequest, RolloutEngine } from '../src/index.ts'
import { checkPython, machine, median, transformers } from './lib/baseline.ts'
import { randomModel } from './lib/random-model.ts'
import { report } from './lib/table.ts'
import { PLAIN_SAMPLING } from '../src/http/generation/plain-sampling.ts'

// Decode at batch 1 against the machine's read bandwidth, decode at batch 16 and prefill of 512 tokens against
// transformers on torch. All of it runs through the engine as a server uses it: worker thread, scheduler, events.
// usage: node dist/bench/decode.js

const rivals = checkPython()
const THREADS = Number(process.env.REFIT_THREADS ?? 2)
const folder = randomModel()
let requests = 0
const engine = await createEngine(folder, {
  threads: THREADS,
  maxTotalTokens: 16384,
  contextLength: 4096,
  maxPrefillTokens: 512
})

const bytes = engine.info.weightBytes
await run(engine, 1, 32, 8)
// Alternates (engine, plain read, engine, plain read, ...), because the machine's speed drifts.
const turns: { ms: number, gbs: number, read: number }[] = []
while (turns.length < 7) {
  const ms = median(await run(engine, 1, 32, 36))
  turns.push({ ms, gbs: bytes / ms / 1e6, read: machine('read', bytes, THREADS).medianGBs })
}
const single = turns.sort((a, b) => a.gbs / a.read - b.gbs / b.read)[turns.length >> 1]!

// transformers runs before and after refit, for the same reason.
const before = transformers(folder, THREADS, 'prefill', 'decode')
const batchMs = median([...await run(engine, 16, 32, 24), ...await run(engine, 16, 32, 24)])
const prefillMs = median(await prefill(engine, 512, 5))
await engine.close()
const after = transformers(folder, THREADS, 'prefill', 'decode')
const torch = { prefill: (before.prefill! + after.prefill!) / 2, decode: (before.decode! + after.decode!) / 2 }

report('decode', [
  {
    figure: `decode, batch 1, ${(bytes / 1e9).toFixed(2)} GB of bf16`,
    ours: `${single.ms.toFixed(1)} ms/token, ${single.gbs.toFixed(1)} GB/s`,
    other: `${single.read} GB/s, vectorised ${THREADS}-thread read; median of ${turns.length} turns`,
    ratio: single.gbs / single.read,
    goal: 0.85
  },
  {
    figure: 'decode, batch 16',
    ours: `${batchMs.toFixed(1)} ms/step`,
    other: `${torch.decode.toFixed(1)} ms/step, transformers`,
    ratio: torch.decode / batchMs,
    goal: 2
  },
  {
    figure: 'prefill, 512 tokens',
    ours: `${prefillMs.toFixed(0)} ms`,
    other: `${torch.prefill.toFixed(0)} ms, transformers`,
    ratio: torch.prefill / prefillMs,
    goal: 0.8
  }
], rivals)

/** Milliseconds between the tokens of the first of `batch` requests, once all are running. */
async function run (engine: RolloutEngine, batch: number, prompt: number, tokens: number): Promise<number[]> {
  const times: number[] = []
  await Promise.all(Array.from({ length: batch }, async (_, index) => {
    for await (const event of engine.generate(request(prompt, tokens))) {
      if (index === 0 && event.tokens.length > 0) times.push(performance.now())
    }
  }))
  return times.map((time, i) => time - times[i - 1]!).slice(Math.min(4, times.length - 2))
}

/** Milliseconds from the request to its one token. */
async function prefill (engine: RolloutEngine, prompt: number, rounds: number): Promise<number[]> {
  const times: number[] = []
  for (let round = 0; round < rounds; round++) {
    const start = performance.now()
    for await (const event of engine.generate(request(prompt, 1))) {
      if (event.tokens.length > 0) times.push(performance.now() - start)
    }
  }
  return times
}

function request (prompt: number, tokens: number): GenerateRequest {
  const id = requests++
  return {
    rid: `bench-${id}`,
    // A new prompt each time, so that the prefix cache has no hits.
    inputIds: Int32Array.from({ length: prompt }, (_, i) => (id * 7907 + i * 104729) % 32000),
    sampling: {
      maxNewTokens: tokens,
      ...PLAIN_SAMPLING,
      seed: 1n
    },
    logprobs: null
  }
}
