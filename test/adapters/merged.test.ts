import t from 'tap'
import type { Test } from 'tap'
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createEngine } from '../../src/app/create-engine.ts'
import type { EngineOptions } from '../../src/app/create-engine.ts'
import type { LocalEngine } from '../../src/engine/local-engine.ts'
import { parseModelConfig } from '../../src/model/parse-config.ts'
import type { ArchitectureName } from '../../src/model/families.ts'
import { mergedTensors, peftTensors, tensorSource, testAdapter } from '../helpers/adapters.ts'
import { checkpointTensors, writeTensors } from '../helpers/make-checkpoint.ts'
import type { CheckpointTensor } from '../helpers/make-checkpoint.ts'
import { rollout, rolloutRequest } from '../helpers/rollout.ts'
import { tinyConfig } from '../helpers/tiny-config.ts'

// An engine with an adapter computes what an engine whose weights have the adapter merged into them computes.

const folder = mkdtempSync(join(tmpdir(), 'refit-adapters-'))
t.teardown(() => {
  rmSync(folder, { recursive: true, force: true })
})
const OPTIONS: EngineOptions = { threads: 1, maxTotalTokens: 1024, maxRunningRequests: 8, dtype: 'float32' }
const PROMPTS = [
  Array.from({ length: 37 }, (_, i) => (3 + i * 11) % 320),
  Array.from({ length: 5 }, (_, i) => (100 + i * 31) % 320),
  [319, 0, 1]
]
const CLOSE = 2e-4

let made = 0
async function start (t: Test, name: ArchitectureName, tensors: CheckpointTensor[], options: EngineOptions = {}) {
  const path = join(folder, String(made++))
  writeTensors(path, tensors)
  writeFileSync(join(path, 'config.json'), JSON.stringify(tinyConfig(name, { dtype: 'float32' })))
  const engine = await createEngine(path, { ...OPTIONS, ...options })
  t.teardown(async () => {
    await engine.close()
  })
  return engine
}

/** Scores of the prompts and of greedy continuations. */
async function scores (engine: LocalEngine, adapter?: string) {
  return await Promise.all(PROMPTS.map(async prompt => {
    const request = rolloutRequest(prompt, { maxNewTokens: 8, temperature: 0, ignoreEos: true }, { startLen: 1 })
    const { tokens, logprobs, input } = await rollout(engine, adapter === undefined ? request : { ...request, adapter })
    return { tokens, values: [...input.slice(1), ...logprobs] as number[] }
  }))
}

function largestDifference (some: { values: number[] }[], others: { values: number[] }[]): number {
  const differences = some.flatMap(({ values }, i) => values.map((value, j) => Math.abs(value - others[i]!.values[j]!)))
  return Math.max(...differences)
}

for (
  const name of [
    'LlamaForCausalLM',
    'Qwen2ForCausalLM',
    'Qwen3ForCausalLM',
    'Qwen3MoeForCausalLM',
    'Olmo2ForCausalLM'
  ] as const
) {
  t.test(`${name}: an adapter equals merged weights, at tp 1 and 2, alone and in a mixed batch`, async t => {
    const arch = parseModelConfig(tinyConfig(name, { dtype: 'float32' }))
    const isTied = arch.tieWordEmbeddings
    // A tied head is the embedding itself, so an adapter of one alone has no merged counterpart.
    const targets = [
      'q_proj',
      'k_proj',
      'v_proj',
      'o_proj',
      'gate_proj',
      'up_proj',
      'down_proj',
      ...isTied ? [] : ['embed_tokens', 'lm_head'] as const
    ] as const
    const adapters = [
      testAdapter(arch, { rank: 8, variant: 1, targets, size: 0.3 }),
      testAdapter(arch, { rank: 1, alpha: 3, variant: 2, targets, useRslora: true }),
      testAdapter(arch, { rank: 20, variant: 3, targets: ['q_proj', 'v_proj', 'down_proj'], size: 0.2 })
    ]
    const base = checkpointTensors(arch, { dtype: 'float32' })
    const merged = []
    for (const adapter of adapters) merged.push(await scores(await start(t, name, mergedTensors(arch, adapter))))
    const plain = await scores(await start(t, name, base))
    for (const tp of [1, 2]) {
      const engine = await start(t, name, base, {
        tp,
        enableLora: true,
        maxLoras: 3,
        maxLoraRank: 20,
        loraTargetModules: ['all']
      })
      for (const [i, adapter] of adapters.entries()) {
        const report = await engine.adapters!.load(`a${i}`, adapter.config, tensorSource(peftTensors(adapter)))
        t.match(report, { version: i + 1, missingCount: 0, isZero: false, resident: true })
      }
      const alone = []
      for (const i of adapters.keys()) {
        alone.push(await scores(engine, `a${i}`))
        const difference = largestDifference(alone[i]!, merged[i]!)
        t.ok(difference < CLOSE, `tp ${tp}, adapter ${i}: logprobs differ by ${difference}`)
        t.ok(largestDifference(alone[i]!, plain) > 20 * CLOSE, 'and not by as much as from the base model')
      }
      t.ok(await engine.flushCache(1000))
      const mixed = await Promise.all([scores(engine), ...adapters.map((_, i) => scores(engine, `a${i}`))])
      t.same(mixed.slice(1), alone, `tp ${tp}: the same bits in a mixed batch`)
      t.ok(largestDifference(mixed[0]!, plain) < CLOSE, 'the base model is as without adapters')
    }
  })
}
