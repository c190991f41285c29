import type { RolloutEngine } from '../../contract/rollout-engine.ts'
import { VllmSleep } from './sleep.ts'
import { onePer } from '../one-per.ts'

/** The one of an engine: every route that puts it to sleep, pauses or resumes it shares it. */
export const vllmSleepOf = onePer((engine: RolloutEngine) => new VllmSleep(engine))
