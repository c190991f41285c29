import type { RolloutEngine } from '../engine/rollout-engine.ts'
import { VllmSleep } from './vllm-sleep.ts'

const sleepers = new WeakMap<RolloutEngine, VllmSleep>()

/** The one of an engine: every dialect that puts it to sleep, pauses or resumes it in vLLM's way shares it. */
export function vllmSleepOf (engine: RolloutEngine): VllmSleep {
  let sleeper = sleepers.get(engine)
  if (sleeper === undefined) sleepers.set(engine, sleeper = new VllmSleep(engine))
  return sleeper
}
