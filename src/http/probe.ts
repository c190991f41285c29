import { setTimeout as sleep } from 'node:timers/promises'
import { randomBytes } from 'node:crypto'
import type { ServingEngine } from '../contract/rollout-engine.ts'
import { PLAIN_SAMPLING } from './generation/plain-sampling.ts'

const POLL_MS = 50

/**
 * True once the engine has shown that it computes: it answered a request of one token, or made a step for others. Also
 * true while it is paused, asleep or in a weight transaction that writes, since it is idle on purpose then. False if
 * nothing happened in time.
 */
export async function computes (engine: ServingEngine, timeoutMs: number): Promise<boolean> {
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

function isIdleOnPurpose ({ stats, weights, transactions }: ServingEngine): boolean {
  return stats.paused !== null || weights.state === 'asleep' || transactions.writing
}

async function probeOnce (engine: ServingEngine, rid: string): Promise<void> {
  const sampling = { ...PLAIN_SAMPLING, maxNewTokens: 1 }
  for await (const event of engine.generate({ rid, inputIds: Int32Array.of(0), sampling, logprobs: null })) {
    if (event.tokens.length > 0) return
  }
}
