import type { RolloutEngine } from '../../contract/rollout-engine.ts'
import { VllmSleep } from './sleep.ts'
import { memoize } from '../memoize.ts'

/** The one of an engine: every route that puts it to sleep, pauses or resumes it shares it. */
export const vllmSleepOf = memoize((engine: RolloutEngine) => new VllmSleep(engine))
