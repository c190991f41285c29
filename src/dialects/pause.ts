import type { ServerContext } from '../http/context.ts'
import { refuseDuringPause } from '../http/generation/refusing-pause.ts'
import { vllmSleepOf } from './vllm/sleep-of.ts'

/**
 * A pause that the trainer requests, in any dialect: waking up from a sleep does not end it. With `refuses`, new
 * requests are refused until its end; else they wait for it.
 */
export async function pauseFor (
  { engine, metrics }: ServerContext,
  mode: Parameters<ServerContext['engine']['pause']>[0],
  { refuses = false } = {}
): Promise<void> {
  vllmSleepOf(engine).disown()
  refuseDuringPause(engine, refuses)
  await engine.pause(mode)
  metrics.pauseBegan()
}

export async function resumeFor ({ engine, metrics }: ServerContext): Promise<void> {
  vllmSleepOf(engine).disown()
  refuseDuringPause(engine, false)
  await engine.resume()
  metrics.pauseEnded()
}
