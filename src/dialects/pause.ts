import type { ServerContext } from '../http/context.ts'
import { vllmSleepOf } from './vllm/sleep-of.ts'

/** A pause that the trainer requests, in any dialect: waking up from a sleep does not end it. */
export async function pauseFor (
  { engine, metrics }: ServerContext,
  mode: Parameters<ServerContext['engine']['pause']>[0]
): Promise<void> {
  vllmSleepOf(engine).disown()
  await engine.pause(mode)
  metrics.pauseBegan()
}

export async function resumeFor ({ engine, metrics }: ServerContext): Promise<void> {
  vllmSleepOf(engine).disown()
  await engine.resume()
  metrics.pauseEnded()
}
