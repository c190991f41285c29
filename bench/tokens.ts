import { performance } from 'node:perf_hooks'
import { join } from 'node:path'
import { createEngine, createServer } from '../src/index.ts'
import type { GenerateRequest } from '../src/contract/rollout-engine.ts'
import { PLAIN_SAMPLING } from '../src/http/generation/plain-sampling.ts'
import { packageRoot } from '../src/root.ts'
import { loadTokenizer } from '../src/text/tokenizer.ts'
import { median } from './lib/baseline.ts'
import { report } from './lib/table.ts'

// The time of the main thread for each token of many requests at once: replies of /generate in one piece, beside a loop
// that only reads the engine's events. All other threads wait for this one if a step is shorter than its tokens take.
// usage: node dist/bench/tokens.js

const REQUESTS = 64
const TOKENS = 400
const ROUNDS = 9

const model = join(packageRoot, 'models/adder')
const engine = await createEngine(model, { threads: 1, maxRunningRequests: REQUESTS, contextLength: 500 })
const app = await createServer({
  engine,
  tokenizer: await loadTokenizer(model),
  modelRoots: [join(packageRoot, 'models')],
  logger: false
})
const prompts = Array.from({ length: REQUESTS }, (_, i) => [10 + i % 10, 10 + i % 7, 12, 13])

async function served (): Promise<void> {
  const reply = await app.inject({
    method: 'POST',
    url: '/generate',
    payload: {
      input_ids: prompts,
      sampling_params: { max_new_tokens: TOKENS, temperature: 0, ignore_eos: true }
    }
  })
  if (reply.statusCode !== 200) throw new Error(`generate answered ${reply.statusCode}: ${reply.body.slice(0, 300)}`)
}

let names = 0
async function read (): Promise<void> {
  await Promise.all(prompts.map(async prompt => {
    const request: GenerateRequest = {
      rid: String(names++),
      inputIds: Int32Array.from(prompt),
      sampling: { ...PLAIN_SAMPLING, maxNewTokens: TOKENS, temperature: 0, ignoreEos: true, seed: null },
      logprobs: null
    }
    let tokens = 0
    for await (const event of engine.generate(request)) tokens += event.tokens.length
    if (tokens !== TOKENS) throw new Error(`${tokens} tokens of ${TOKENS}`)
  }))
}

/** Microseconds of this thread for a token. */
async function busy (run: () => Promise<void>): Promise<number> {
  const before = performance.eventLoopUtilization()
  await run()
  return 1000 * performance.eventLoopUtilization(before).active / (REQUESTS * TOKENS)
}

const times = { served: [] as number[], read: [] as number[] }
for (let i = 0; i < ROUNDS; i++) {
  const found = { served: await busy(served), read: await busy(read) }
  // V8 optimizes the code in the first rounds.
  if (i < 3) continue
  times.served.push(found.served)
  times.read.push(found.read)
}
await app.close()
await engine.close()

report('overhead', [
  {
    figure: `main thread for a token, ${REQUESTS} requests of ${TOKENS} tokens at once`,
    ours: `${median(times.served).toFixed(2)} us by /generate`,
    other: `${median(times.read).toFixed(2)} us, reading the engine's events`,
    ratio: median(times.read) / median(times.served),
    goal: 0.3
  }
])
