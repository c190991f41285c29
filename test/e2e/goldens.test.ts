import t from 'tap'
import { readdirSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import { createEngine } from '../../src/engine/create-engine.ts'
import { packageRoot } from '../../src/root.ts'
import { rollout, rolloutRequest } from '../helpers/rollout.ts'

// The whole engine (worker, scheduler, native core) against what transformers computed: test/goldens/make.py.

interface Case { prompt: number[], greedy: number[], gaps: number[], logprobs: Record<string, number[]> }

const FOLDER = join(packageRoot, 'test/goldens')
const MODELS = readdirSync(FOLDER, { withFileTypes: true }).filter(entry => entry.isDirectory()).map(entry => entry.name)
// Below this difference of the two best logits, rounding may turn the order.
const CLEAR_GAP = { float32: 1e-3, bfloat16: 0.25 }

for (const model of MODELS) {
  const golden = JSON.parse(readFileSync(join(FOLDER, model, 'golden.json'), 'utf8')) as { cases: Case[] }

  for (const dtype of ['float32', 'bfloat16'] as const) {
    t.test(`${model} in ${dtype} continues greedily as transformers does`, async t => {
      const engine = await createEngine(join(FOLDER, model), { dtype, threads: 1, maxTotalTokens: 2048 })
      t.teardown(async () => { await engine.close() })
      const results = await Promise.all(golden.cases.map(async ({ prompt }) => await rollout(engine, rolloutRequest(prompt, { maxNewTokens: 32, temperature: 0 }))))
      for (const [index, { greedy, gaps }] of golden.cases.entries()) {
        const unclear = gaps.findIndex(gap => gap < CLEAR_GAP[dtype])
        const sure = unclear === -1 ? greedy.length : unclear
        t.same(results[index]!.tokens.slice(0, sure), greedy.slice(0, sure), `case ${index}: ${sure} clear tokens`)
      }
    })
  }

  t.test(`${model} in float32 scores every token as transformers does`, async t => {
    const engine = await createEngine(join(FOLDER, model), { dtype: 'float32', threads: 1, maxTotalTokens: 2048 })
    t.teardown(async () => { await engine.close() })
    for (const { prompt, greedy, logprobs } of golden.cases) {
      const { input } = await rollout(engine, rolloutRequest([...prompt, ...greedy], { maxNewTokens: 0 }, { startLen: 0 }))
      const expected = logprobs['1.0'] ?? logprobs['1']!
      t.equal(input[0], null)
      t.equal(input.length, prompt.length + greedy.length)
      const worst = Math.max(...expected.map((value, i) => Math.abs(value - input[i + 1]!)))
      t.ok(worst <= 1e-4, `largest difference ${worst}`)
    }
  })
}
