import { join } from 'node:path'
import { createEngine } from '../src/app/create-engine.ts'
import { packageRoot } from '../src/root.ts'
import type { Grammar } from '../src/contract/grammar.ts'
import type { LocalEngine } from '../src/engine/local-engine.ts'
import { loadTokenizer } from '../src/text/tokenizer.ts'
import { makeVocabulary } from '../src/text/vocabulary.ts'
import { median } from './lib/baseline.ts'
import { ratioOf, spread } from './lib/measure.ts'
import type { Cost, Turn } from './lib/measure.ts'
import { randomModel } from './lib/random-model.ts'
import { report } from './lib/table.ts'
import { PLAIN_SAMPLING } from '../src/http/generation/plain-sampling.ts'

// Decode at batch 16 with a grammar and without, in turns. The masks allow many tokens (a long text), and change at
// every token. usage: node dist/bench/grammars.js

const THREADS = Number(process.env.REFIT_THREADS ?? 2)
const TOKENS = 48
const VOCABULARY = 32000
const TURNS = Number(process.env.REFIT_TURNS ?? 5)

const GRAMMARS: [name: string, grammar: Grammar][] = [
  ['a JSON string', { kind: 'json_schema', schema: '{"type":"string","minLength":2000}' }],
  ['a pattern that counts', { kind: 'regex', pattern: '[a-z ,.]{1000}' }]
]

// The texts of a small tokenizer, behind the model's two special tokens, and words up to the size of its vocabulary.
const tokenizer = (await loadTokenizer(join(packageRoot, 'test/fixtures/text/qwen-like')))!
const small = tokenizer.vocabulary!
const SPECIAL = [0, 1]
const vocabulary = makeVocabulary(
  VOCABULARY,
  textOf,
  [...SPECIAL, ...small.special].map((id, i) => i < 2 ? id : id + 2)
)
const engine = await createEngine(randomModel(), {
  threads: THREADS,
  maxTotalTokens: 16384,
  contextLength: 4096,
  vocabulary
})
let requests = 0
const figures = []
await decode(engine)
for (const [name, grammar] of GRAMMARS) {
  // The first turn fills the caches of the grammar, as the first requests of a server do.
  const first = await decode(engine, grammar)
  const turns: Turn[] = []
  for (let i = 0; i < TURNS; i++) {
    turns.push({ other: await decode(engine), ours: await decode(engine, grammar) })
  }
  const plain = median(turns.map(turn => turn.other.ms))
  const masked = median(turns.map(turn => turn.ours.ms))
  figures.push({
    figure: `decode, batch 16, ${name}`,
    ours: `${masked.toFixed(1)} ms/step (${first.ms.toFixed(1)} for the first requests); ${spread(turns)}`,
    other: `${plain.toFixed(1)} ms/step without a grammar`,
    ratio: ratioOf(turns),
    goal: 0.9
  })
}
await engine.close()
report('grammars', figures)

/** The cost of a decode step of 16 requests; the processor time of a step has a part of the prefill. */
async function decode (engine: LocalEngine, grammar?: Grammar): Promise<Cost> {
  const before = process.cpuUsage()
  const ends = await Promise.all(Array.from({ length: 16 }, async (_, i) => await one(engine, i, grammar)))
  const begin = Math.max(...ends.map(end => end.first))
  const { user, system } = process.cpuUsage(before)
  return {
    ms: (Math.max(...ends.map(end => end.last)) - begin) / (TOKENS - 1),
    cpuMs: (user + system) / 1000 / TOKENS
  }
}

async function one (engine: LocalEngine, i: number, grammar?: Grammar): Promise<{ first: number, last: number }> {
  let first = 0
  const events = engine.generate({
    rid: `bench-${requests++}`,
    inputIds: Int32Array.from({ length: 32 }, (_, j) => (i * 131 + j * 17) % VOCABULARY),
    sampling: {
      maxNewTokens: TOKENS,
      ...PLAIN_SAMPLING,
      temperature: 1,
      seed: BigInt(i)
    },
    logprobs: null,
    ...grammar === undefined ? {} : { grammar }
  })
  for await (const { finish, completionTokens } of events) {
    if (completionTokens === 1) first = performance.now()
    if (finish !== null && completionTokens !== TOKENS) throw new Error(`ended after ${completionTokens} tokens`)
  }
  return { first, last: performance.now() }
}

function textOf (id: number): Uint8Array {
  const at = id - SPECIAL.length
  if (at < 0) return Buffer.from(`<special ${id}>`)
  return at < tokenizer.vocabSize ? small.bytes.subarray(small.offsets[at], small.offsets[at + 1]) : word(id)
}

function word (id: number): Buffer {
  const letters = 'etaoinshrdlucmfw'
  return Buffer.from(
    (id % 3 === 0 ? ' ' : '') + Array.from(id.toString(16), digit => letters[Number.parseInt(digit, 16)]).join('')
  )
}
