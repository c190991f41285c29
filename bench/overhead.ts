import { join } from 'node:path'
import { Agent, request } from 'undici'
import { createEngine, createServer } from '../src/index.ts'
import { packageRoot } from '../src/root.ts'
import { loadTokenizer } from '../src/text/tokenizer.ts'
import { median } from './lib/baseline.ts'
import { report } from './lib/table.ts'

// The time that HTTP, the scheduler and its thread add to the engine's own step: /generate of one token on the adder.
// usage: node dist/bench/overhead.js

const model = join(packageRoot, 'models/adder')
const engine = await createEngine(model, { threads: 2 })
const app = await createServer({
  engine,
  tokenizer: await loadTokenizer(model),
  modelRoots: [join(packageRoot, 'models')],
  logger: false
})
const url = await app.listen({ port: 0, host: '127.0.0.1' })
const dispatcher = new Agent({ pipelining: 1, connections: 1 })

const whole: number[] = []
const steps: number[] = []
// V8 has optimized the code after some thousand requests.
for (let i = 0; i < 5000; i++) {
  const body = JSON.stringify({
    input_ids: [10 + i % 10, 10 + i % 7, 12, 13],
    sampling_params: { max_new_tokens: 1, temperature: 0, ignore_eos: true }
  })
  const start = performance.now()
  const reply = await request(`${url}/generate`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body,
    dispatcher
  })
  await reply.body.text()
  const ms = performance.now() - start
  if (reply.statusCode !== 200) throw new Error(`generate answered ${reply.statusCode}`)
  if (i >= 4000) {
    whole.push(ms)
    steps.push(engine.stats.stepMs)
  }
}
await dispatcher.close()
await app.close()
await engine.close()

const added = median(whole) - median(steps)
report('overhead', [
  {
    figure: '/generate of one token, beyond the engine step',
    ours: `${added.toFixed(3)} ms (${median(whole).toFixed(3)} whole, ${median(steps).toFixed(3)} step)`,
    other: '1 ms allowed',
    ratio: 1 / added,
    goal: 1
  }
])
