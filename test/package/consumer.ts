import Fastify from 'fastify'
import refit, { createEngine } from 'refit'
import type { RolloutEngine, TokenEvent } from 'refit'

// Type-checked against the packed package by test/package/run.js; never run.

export async function consume (folder: string): Promise<number> {
  const engine: RolloutEngine = await createEngine(folder, { threads: 1 })
  const app = Fastify()
  await app.register(refit, { engine, prefix: '/rollout' })
  await app.ready()
  let tokens = 0
  const events: AsyncIterable<TokenEvent> = engine.generate({
    rid: 'a',
    inputIds: Int32Array.of(1, 2, 3),
    logprobs: null,
    sampling: {
      maxNewTokens: 4,
      minNewTokens: 0,
      temperature: 0,
      topP: 1,
      topK: 0,
      minP: 0,
      frequencyPenalty: 0,
      presencePenalty: 0,
      repetitionPenalty: 1,
      stopTokenIds: [],
      ignoreEos: false,
      logitBias: [],
      seed: null
    }
  })
  for await (const event of events) tokens += event.tokens.length
  await app.close()
  // @ts-expect-error the engine's types are there, so this is a mistake
  engine.generate({ rid: 1 })
  return tokens
}
