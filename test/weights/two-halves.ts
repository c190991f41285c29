import type { Test } from 'tap'
import { mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createEngine } from '../../src/app/create-engine.ts'
import type { EngineOptions } from '../../src/app/create-engine.ts'
import type { OnRunning } from '../../src/contract/rollout-engine.ts'
import type { LocalEngine } from '../../src/engine/local-engine.ts'
import { openDiskSource } from '../../src/sources/disk/disk.ts'
import { randomValues, writeCheckpoint, writeModelFolder } from '../helpers/make-checkpoint.ts'
import { prompt, rollout, rolloutRequest } from '../helpers/rollout.ts'
import type { Rollout } from '../helpers/rollout.ts'
import { tinyConfig } from '../helpers/tiny-config.ts'

// Models that are two halves, each of variant a or b; a label names both. An update brings one half or all of a model.

/** The labels of all models. */
export const HALVES = ['aa', 'ab', 'ba', 'bb']
export const PROMPTS = [5, 40, 17, 33, 90].map((length, i) => prompt(i, length, 320))
const isFirst = (name: string): boolean => /layers\.0|embed/.test(name)

export interface Models {
  root: string
  /** Folder of the whole model, by its label. */
  whole: (label: string) => string
  /** Folder of one half: 0 or 1, variant a or b. */
  half: (index: number, variant: string) => string
}

export function writeModels (t: Test): Models {
  const root = mkdtempSync(join(tmpdir(), 'refit-shadow-'))
  t.teardown(() => {
    rmSync(root, { recursive: true })
  })
  const config = tinyConfig('Qwen3ForCausalLM')
  const values = { a: randomValues(1), b: randomValues(2) } as Record<string, ReturnType<typeof randomValues>>
  for (const label of HALVES) {
    const of = (name: string, index: number): number => values[label[isFirst(name) ? 0 : 1]!]!(name, index)
    const arch = writeModelFolder(join(root, label), config, { values: of })
    if (label[0] !== label[1]) continue
    writeCheckpoint(join(root, `0${label[0]!}`), arch, { values: of, omit: name => !isFirst(name) })
    writeCheckpoint(join(root, `1${label[0]!}`), arch, { values: of, omit: isFirst })
  }
  return {
    root,
    whole: label => join(root, label),
    half: (index, variant) => join(root, `${index}${variant}`)
  }
}

export async function engineOf (t: Test, folder: string, options: EngineOptions): Promise<LocalEngine> {
  const engine = await createEngine(folder, { threads: 1, maxTotalTokens: 4096, ...options })
  t.teardown(async () => {
    await engine.close()
  })
  return engine
}

export const requestOf = (index: number, maxNewTokens = 6) => rolloutRequest(PROMPTS[index]!, { maxNewTokens })
export const visible = ({ tokens, logprobs }: Rollout): object => ({ tokens, logprobs })

/** The rollouts and the checksums of engines that were loaded fresh, by label. */
export async function freshResults (models: Models, options: EngineOptions) {
  const results = new Map<string, { rollouts: Rollout[], checksums: unknown }>()
  for (const label of HALVES) {
    const engine = await createEngine(models.whole(label), { threads: 1, maxTotalTokens: 4096, ...options })
    const rollouts: Rollout[] = []
    for (const index of PROMPTS.keys()) rollouts.push(await rollout(engine, requestOf(index)))
    results.set(label, { rollouts, checksums: await engine.checksums() })
    await engine.close()
  }
  return results
}

/** Updates the second set from a folder, and swaps. */
export async function update (
  engine: LocalEngine,
  root: string,
  folder: string,
  version: string,
  onRunning: OnRunning = 'continue'
): Promise<void> {
  const source = await openDiskSource(folder, { roots: [root] })
  const update = await engine.update({ swap: 'demand', onRunning })
  try {
    await update.write(source)
    await update.commit({ version })
  } catch (error) {
    await update.abort('it failed')
    throw error
  } finally {
    await source.close()
  }
}
