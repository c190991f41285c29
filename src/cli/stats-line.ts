import type { EngineStats, RolloutEngine } from '../contract/rollout-engine.ts'

const EVERY_MS = 10_000

/** Logs one line for every 10 s in which the engine had work. Returns the function that stops it. */
export function logStats (
  engine: Pick<RolloutEngine, 'stats'>,
  log: (fields: object, line: string) => void,
  everyMs = EVERY_MS
): () => void {
  let before = engine.stats
  let since = performance.now()
  const timer = setInterval(() => {
    const stats = engine.stats
    const now = performance.now()
    if (stats.running > 0 || stats.queued > 0 || stats.steps !== before.steps) {
      log(...statsLine(before, stats, (now - since) / 1000))
    }
    before = stats
    since = now
  }, everyMs)
  timer.unref()
  return () => clearInterval(timer)
}

/** A summary of the changes between two readings that are `seconds` apart. */
export function statsLine (before: EngineStats, after: EngineStats, seconds: number): [fields: object, line: string] {
  const prompt = after.promptTokens - before.promptTokens
  const hits = after.prefixHitTokens - before.prefixHitTokens
  const fields = {
    running: after.running,
    queued: after.queued,
    generatedPerSecond: round((after.generationTokens - before.generationTokens) / seconds),
    promptPerSecond: round(prompt / seconds),
    kvUsedPercent: round(100 * after.usedTokens / Math.max(1, after.totalTokens)),
    prefixHitPercent: round(100 * hits / Math.max(1, prompt)),
    retractions: after.retractions - before.retractions,
    draftTokens: after.draftTokens - before.draftTokens,
    acceptedTokens: after.acceptedTokens - before.acceptedTokens
  }
  return [
    fields,
    `${fields.running} running, ${fields.queued} queued, ${fields.generatedPerSecond} tok/s generated, ` +
    `${fields.promptPerSecond} tok/s of prompts, ` +
    `KV cache ${fields.kvUsedPercent} % used, prefix hits ${fields.prefixHitPercent} %${
      fields.draftTokens === 0 ? '' : `, ${fields.acceptedTokens} of ${fields.draftTokens} guessed tokens right`
    }${after.paused === null ? '' : `, paused (${after.paused})`}`
  ]
}

function round (value: number): number {
  return Math.round(value * 10) / 10
}
