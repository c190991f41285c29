import type { ServingEngine } from '../../contract/rollout-engine.ts'
import { VllmSleep } from './sleep.ts'
import { memoize } from '../memoize.ts'

/** The engine's only VllmSleep: all routes that sleep, pause or resume use it. */
export const vllmSleepOf = memoize((engine: ServingEngine) => new VllmSleep(engine))
