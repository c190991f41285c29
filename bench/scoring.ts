import { request } from 'undici'
import { createEngine, createServer } from '../src/index.ts'
import { median } from './lib/baseline.ts'
import { measure, ratioOf, spread } from './lib/measure.ts'
import type { Cost, Turn } from './lib/measure.ts'
import { randomModel } from './lib/random-model.ts'
import { report } from './lib/table.ts'

// A teacher scores chosen ids at each position of prompts (vLLM's matrix) over HTTP, in turns with the same prompts
// without scores. On a GPU: REFIT_MODEL=... REFIT_DEVICE=cuda REFIT_SAMPLES=64 REFIT_TOKENS=4096.
// usage: node dist/bench/scoring.js

const SAMPLES = Number(process.env.REFIT_SAMPLES ?? 4)
const TOKENS = Number(process.env.REFIT_TOKENS ?? 512)
const TURNS = Number(process.env.REFIT_TURNS ?? 3)
const IDS = 32

const engine = await createEngine(process.env.REFIT_MODEL ?? randomModel(), {
  device: process.env.REFIT_DEVICE === 'cuda' ? 'cuda' : 'cpu',
  threads: Number(process.env.REFIT_THREADS ?? 2),
  ...process.env.REFIT_DEVICE === 'cuda' ? {} : { maxTotalTokens: SAMPLES * (TOKENS + 64) }
})
const app = await createServer({ engine, tokenizer: null, logger: false })
const url = await app.listen({ port: 0, host: '127.0.0.1' })
const { vocabSize } = engine.info

let prompts = 0
const turns: Turn[] = []
await batch(false)
for (let i = 0; i < TURNS; i++) turns.push({ other: await batch(false), ours: await batch(true) })
await app.close()
await engine.close()

const plain = median(turns.map(turn => turn.other.ms))
const scored = median(turns.map(turn => turn.ours.ms))
const rate = (ms: number): string => `${(SAMPLES * TOKENS / ms * 1000).toFixed(0)} tokens/s`
report('scoring', [{
  figure: `scores of ${IDS} ids a position, ${SAMPLES} prompts of ${TOKENS} tokens`,
  ours: `${scored.toFixed(0)} ms (${rate(scored)}); ${spread(turns)}`,
  other: `${plain.toFixed(0)} ms (${rate(plain)}) for their prefill`,
  ratio: ratioOf(turns),
  goal: 0.8
}])

/** The cost of prompts that no other batch has sent. */
async function batch (scores: boolean): Promise<Cost> {
  const bodies = Array.from({ length: SAMPLES }, () => {
    const salt = prompts++
    return JSON.stringify({
      token_ids: Array.from({ length: TOKENS }, (_, i) => 2 + (salt * 131 + i * 17) % (vocabSize - 2)),
      sampling_params: {
        max_tokens: 1,
        temperature: 0,
        ignore_eos: true,
        ...scores
          ? {
            prompt_logprob_token_ids: Array.from(
              { length: TOKENS - 1 },
              (_, i) => Array.from({ length: IDS }, (_, j) => (i * 37 + j * 101) % vocabSize)
            )
          }
          : {}
      }
    })
  })
  return await measure(async () => {
    await Promise.all(bodies.map(async body => {
      await send(body, scores)
    }))
  })
}

async function send (body: string, scores: boolean): Promise<void> {
  const reply = await request(`${url}/inference/v1/generate`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body
  })
  const { prompt_token_id_logprobs: matrix } = await reply.body.json() as { prompt_token_id_logprobs: string | null }
  const bytes = Buffer.from(matrix ?? '', 'base64').length
  if (reply.statusCode !== 200 || bytes < (scores ? (TOKENS - 1) * IDS * 4 : 0)) {
    throw new Error(`/inference/v1/generate answered ${reply.statusCode} and ${bytes} bytes of scores`)
  }
}
