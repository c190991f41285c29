import { setTimeout as sleep } from 'node:timers/promises'
import { randomBytes } from 'node:crypto'
import type { RolloutEngine } from '../contract/rollout-engine.ts'

const POLL_MS = 50

/**
 * True once the engine has shown that it computes: it answered a request of one token, or made a step for others. Also
 * true while it is paused, asleep or in a weight transaction that writes, since it is idle on purpose then. False if
 * nothing happened in time.
 */
export async function computes (engine: RolloutEngine, timeoutMs: number): Promise<boolean> {
  if (isIdleOnPurpose(engine)) return true
  const steps = engine.stats.steps
  const rid = `HEALTH_CHECK_${randomBytes(8).toString('hex')}`
  let answered: boolean | undefined
  // A full queue refuses the probe; then the count of steps decides.
  const probe = probeOnce(engine, rid).then(() => {
    answered = true
  }, () => {
    answered = false
  })
  const deadline = performance.now() + timeoutMs
  try {
    while (performance.now() < deadline) {
      await Promise.race(answered === undefined ? [probe, sleep(POLL_MS)] : [sleep(POLL_MS)])
      if (answered === true || isIdleOnPurpose(engine) || engine.stats.steps !== steps) return true
      if (answered === false && engine.stats.running === 0 && engine.stats.queued === 0) return false
    }
    return false
  } finally {
    engine.abort(rid)
  }
}

function isIdleOnPurpose ({ stats, weights, transactions }: RolloutEngine): boolean {
  return stats.paused !== null || weights.state === 'asleep' || transactions.writing
}

async function probeOnce (engine: RolloutEngine, rid: string): Promise<void> {
  const sampling = {
    maxNewTokens: 1,
    minNewTokens: 0,
    temperature: 0,
    topP: 1,
    topK: 0,
    minP: 0,
    frequencyPenalty: 0,
    presencePenalty: 0,
    repetitionPenalty: 1,
    stopTokenIds: [],
    ignoreEos: true,
    logitBias: [],
    seed: null
  }
  for await (const event of engine.generate({ rid, inputIds: Int32Array.of(0), sampling, logprobs: null })) {
    if (event.tokens.length > 0) return
  }
}
