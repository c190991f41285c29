import { APIS } from '../../../src/load/apis.ts'
import type { LoadPlan } from '../../../src/load/run-load.ts'

/** One request at a time, of few tokens, with every draw from seed 1. */
export const PLAN: Omit<LoadPlan, 'connection'> = {
  api: APIS.sglang,
  model: 'm',
  arrivals: { concurrency: 1 },
  requests: 1,
  seconds: null,
  warmup: 0,
  prompt: { kind: 'fixed', tokens: 7 },
  output: { kind: 'fixed', tokens: 5 },
  sharedPrefix: 0,
  ids: { least: 1, most: 9 },
  samples: 1,
  temperature: 1,
  ignoreEos: true,
  seed: 1,
  timeoutMs: 60_000
}
