import { mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import type { Test } from 'tap'
import { createEngine } from '../../src/app/create-engine.ts'
import type { EngineOptions } from '../../src/app/create-engine.ts'
import type { LocalEngine } from '../../src/engine/local-engine.ts'
import type { Architecture } from '../../src/model/architecture.ts'
import type { ArchitectureName } from '../../src/model/families.ts'
import { parseModelConfig } from '../../src/model/parse-config.ts'
import { peftTensors, tensorSource, testAdapter } from '../helpers/adapters.ts'
import type { TestAdapter } from '../helpers/adapters.ts'
import { checkpointTensors, writeTensors } from '../helpers/make-checkpoint.ts'
import { rollout, rolloutRequest } from '../helpers/rollout.ts'
import type { Rollout } from '../helpers/rollout.ts'
import { tinyConfig } from '../helpers/tiny-config.ts'

export const PROMPT = Array.from({ length: 40 }, (_, i) => (7 + i * 13) % 320)

/** An engine of a tiny model that takes adapters, and functions for tests of them. */
export interface AdapterEngine {
  engine: LocalEngine
  arch: Architecture
  adapter: (variant: number, rank?: number) => TestAdapter
  load: (
    name: string,
    adapter: TestAdapter,
    options?: Parameters<NonNullable<LocalEngine['adapters']>['load']>[3]
  ) => ReturnType<NonNullable<LocalEngine['adapters']>['load']>
  /** Greedy tokens of the prompt, with an adapter or without. */
  generate: (adapter?: string, tokens?: number) => Promise<Rollout>
}

export async function adapterEngine (
  t: Test,
  options: EngineOptions = {},
  name: ArchitectureName = 'Qwen3ForCausalLM'
): Promise<AdapterEngine> {
  const folder = mkdtempSync(join(tmpdir(), 'refit-adapters-'))
  const arch = parseModelConfig(tinyConfig(name))
  writeTensors(folder, checkpointTensors(arch))
  writeFileSync(join(folder, 'config.json'), JSON.stringify(tinyConfig(name)))
  const engine = await createEngine(folder, {
    threads: 1,
    maxTotalTokens: 4096,
    maxRunningRequests: 16,
    enableLora: true,
    maxLoras: 2,
    maxLoraRank: 16,
    ...options
  })
  t.teardown(async () => {
    await engine.close()
    rmSync(folder, { recursive: true, force: true })
  })
  const targets = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj'] as const
  return {
    engine,
    arch,
    adapter: (variant, rank = 8) => testAdapter(arch, { rank, variant, targets }),
    load: async (name, adapter, options) =>
      await engine.adapters!.load(name, adapter.config, tensorSource(peftTensors(adapter)), options),
    generate: async (adapter, tokens = 16) => {
      const request = rolloutRequest(PROMPT, { maxNewTokens: tokens, temperature: 0, ignoreEos: true })
      return await rollout(engine, adapter === undefined ? request : { ...request, adapter })
    }
  }
}
