import { join } from 'node:path'
import { request } from 'undici'
import { createEngine, createServer } from '../src/index.ts'
import { packageRoot } from '../src/root.ts'
import { loadTokenizer } from '../src/text/tokenizer.ts'
import { median } from './lib/baseline.ts'
import { measure, ratioOf, spread } from './lib/measure.ts'
import type { Cost, Turn } from './lib/measure.ts'
import { randomModel } from './lib/random-model.ts'
import { report } from './lib/table.ts'

// The load of agents, in turns with plain generation of the same lengths: conversations of several turns, each as chat
// with exact tokens, tools, a parser of calls and of reasoning, logprobs and the sampling mask of each token.
// usage: node dist/bench/agents.js

const CONVERSATIONS = Number(process.env.REFIT_CONVERSATIONS ?? 32)
const TURNS = Number(process.env.REFIT_TURNS ?? 3)
const PROMPT = 64
const GENERATED = Number(process.env.REFIT_GENERATED ?? 32)
const RESULT = 24
const ROUNDS = Number(process.env.REFIT_ROUNDS ?? 3)
const TOP_K = 20

const TOOLS = ['search', 'python'].map(name => ({
  type: 'function',
  function: { name, parameters: { type: 'object', properties: { query: { type: 'string' } }, required: ['query'] } }
}))

interface Scores {
  output_token_logprobs: [logprob: number, id: number][]
  output_token_sampling_mask: number[][]
}

const engine = await createEngine(process.env.REFIT_MODEL ?? randomModel(), {
  device: process.env.REFIT_DEVICE === 'cuda' ? 'cuda' : 'cpu',
  threads: Number(process.env.REFIT_THREADS ?? 2),
  maxRunningRequests: CONVERSATIONS,
  maxTotalTokens: 4 * CONVERSATIONS * (PROMPT + TURNS * (GENERATED + RESULT))
})
const app = await createServer({
  engine,
  tokenizer: await loadTokenizer(join(packageRoot, 'models', 'adder')),
  toolCallParser: 'hermes',
  reasoningParser: 'qwen3',
  logger: false
})
const url = await app.listen({ port: 0, host: '127.0.0.1' })
const { vocabSize } = engine.info

let begun = 0
const rounds: Turn[] = []
await load(plain, 1)
await load(agent, 1)
for (let i = 0; i < ROUNDS; i++) rounds.push({ other: await load(plain), ours: await load(agent) })
await app.close()
await engine.close()

const generated = CONVERSATIONS * TURNS * GENERATED
const [plainMs, agentsMs] = [median(rounds.map(round => round.other.ms)), median(rounds.map(round => round.ours.ms))]
const rate = (ms: number): string => `${(generated / ms * 1000).toFixed(0)} tokens/s`
report('agents', [{
  figure: `${CONVERSATIONS} conversations of ${TURNS} turns and ${GENERATED} tokens a turn, with tools, masks, scores`,
  ours: `${agentsMs.toFixed(0)} ms (${rate(agentsMs)}); ${spread(rounds)}`,
  other: `${plainMs.toFixed(0)} ms (${rate(plainMs)}) for plain generation`,
  ratio: ratioOf(rounds),
  goal: 0.9
}])

/** The cost of all conversations at once. */
async function load (turn: (ids: number[]) => Promise<number[]>, turns = TURNS): Promise<Cost> {
  return await measure(async () => {
    await Promise.all(Array.from({ length: CONVERSATIONS }, async () => {
      await converse(begun++, turn, turns)
    }))
  })
}

async function converse (salt: number, turn: (ids: number[]) => Promise<number[]>, turns: number): Promise<void> {
  let ids = Array.from({ length: PROMPT }, (_, i) => 2 + (salt * 131 + i * 17) % (vocabSize - 2))
  for (let i = 0; i < turns; i++) {
    const output = await turn(ids)
    if (output.length !== GENERATED) throw new Error(`a turn has ${output.length} tokens, not ${GENERATED}`)
    ids = [...ids, ...output, ...Array.from({ length: RESULT }, (_, j) => 2 + (salt + i * 7 + j) % (vocabSize - 2))]
  }
}

async function plain (ids: number[]): Promise<number[]> {
  const { output_ids: output } = await post('/generate', {
    input_ids: ids,
    sampling_params: { max_new_tokens: GENERATED, ignore_eos: true }
  }) as { output_ids: number[] }
  return output
}

async function agent (ids: number[]): Promise<number[]> {
  const { choices } = await post('/v1/chat/completions', {
    messages: [{ role: 'user', content: 'in input_ids' }],
    input_ids: ids,
    tools: TOOLS,
    max_tokens: GENERATED,
    ignore_eos: true,
    top_k: TOP_K,
    logprobs: true,
    top_logprobs: 1,
    return_meta_info: true,
    return_sampling_mask: true
  }) as { choices: { meta_info: Scores }[] }
  const { output_token_logprobs: scores, output_token_sampling_mask: masks } = choices[0]!.meta_info
  if (masks.some(mask => mask.length < 1 || mask.length > TOP_K)) throw new Error('a token has no sampling mask')
  return scores.map(([, id]) => id)
}

async function post (path: string, body: object): Promise<unknown> {
  const reply = await request(url + path, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify(body)
  })
  const answer: unknown = await reply.body.json()
  if (reply.statusCode !== 200) throw new Error(`${path} answered ${reply.statusCode}: ${JSON.stringify(answer)}`)
  return answer
}
