import type { RolloutEngine } from '../../contract/rollout-engine.ts'
import { VllmSleep } from './sleep.ts'
import { memoize } from '../memoize.ts'

/** The engine's only VllmSleep: all routes that sleep, pause or resume use it. */
export const vllmSleepOf = memoize((engine: RolloutEngine) => new VllmSleep(engine))
