import type { ServingEngine } from '../../contract/rollout-engine.ts'
import { RefitError } from '../../errors.ts'

/** Engines whose last pause refuses new requests. Other pauses hold them. */
const refusing = new WeakSet<ServingEngine>()

/** Called before the engine pauses, so that no request that comes meanwhile waits for the end of the pause. */
export function refuseDuringPause (engine: ServingEngine, refuses: boolean): void {
  if (refuses) refusing.add(engine)
  else refusing.delete(engine)
}

/** Throws while a pause that refuses new requests lasts. */
export function requireNoRefusingPause (engine: ServingEngine): void {
  if (!refusing.has(engine)) return
  const { paused, pausing } = engine.stats
  if (paused === null && !pausing) return
  throw new RefitError('GENERATION_PAUSED', 'Generation is paused. Please retry after it resumes.')
}
