import { availableParallelism } from 'node:os'
import type { Config } from '../config/schema.ts'
import { firstGpu } from '../engine/memory/choose-gpus.ts'
import { MEM_FRACTION } from '../engine/memory/size-core.ts'

/** Far apart, so that the engines of one server and those of another with the next seed draw different seeds. */
const SEED_STEP = 2 ** 32

/**
 * The options of one engine of `--dp`: GPUs of its own, or its part of the CPU and its memory. Only this machine
 * reaches it, with the keys of the server.
 */
export function replicaConfig (config: Config, rank: number, cores = availableParallelism()): Config {
  const { dp, tp, threads, memFraction, randomSeed } = config
  const first = firstGpu(config.device, config.baseGpuId)
  return {
    ...config,
    dp: 1,
    host: '127.0.0.1',
    port: 0,
    // The same seed would draw the same samples on every engine.
    randomSeed: randomSeed === null ? null : (randomSeed + rank * SEED_STEP) % Number.MAX_SAFE_INTEGER,
    ...first === null
      ? { threads: threads ?? Math.max(1, Math.floor(cores / dp)), memFraction: (memFraction ?? MEM_FRACTION.cpu) / dp }
      : { device: 'cuda', baseGpuId: first + rank * tp }
  }
}
