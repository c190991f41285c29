import type { RouteContext } from '../http/context.ts'
import { vllmSleepOf } from './vllm/sleep-of.ts'

/** A pause that the trainer requests, in any dialect: waking up from a sleep does not end it. */
export async function pauseFor (
  { engine, metrics }: RouteContext,
  mode: Parameters<RouteContext['engine']['pause']>[0]
): Promise<void> {
  vllmSleepOf(engine).disown()
  await engine.pause(mode)
  metrics.pauseBegan()
}

export async function resumeFor ({ engine, metrics }: RouteContext): Promise<void> {
  vllmSleepOf(engine).disown()
  await engine.resume()
  metrics.pauseEnded()
}
