import { Counter } from 'prom-client'
import type { Registry } from 'prom-client'
import type { EngineStats, RolloutEngine } from '../contract/rollout-engine.ts'

/** Counts of guessed tokens; none for an engine that guesses nothing. The names without the prefix are vLLM's. */
export function speculationMetrics (registry: Registry, engine: Pick<RolloutEngine, 'info' | 'stats'>): void {
  if (engine.info.speculative === undefined) return
  const counter = (name: string, help: string, read: (stats: EngineStats) => number): void => {
    const own: Counter = new Counter({
      name: `refit:${name}`,
      help,
      registers: [registry],
      collect: () => {
        own.reset()
        own.inc(read(engine.stats))
      }
    })
  }
  counter('spec_decode_num_drafts_total', 'Steps of a request with guessed tokens', ({ drafts }) => drafts)
  counter('spec_decode_num_draft_tokens_total', 'Guessed tokens that were computed', ({ draftTokens }) => draftTokens)
  counter(
    'spec_decode_num_accepted_tokens_total',
    'Guessed tokens that the engine sampled itself',
    ({ acceptedTokens }) => acceptedTokens
  )
}
