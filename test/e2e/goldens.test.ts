import t from 'tap'
import type { Test } from 'tap'
import { createEngine } from '../../src/app/create-engine.ts'
import type { LocalEngine } from '../../src/engine/local-engine.ts'
import type { Scored } from '../../src/contract/rollout-engine.ts'
import { goldenNames, readGolden } from '../helpers/goldens.ts'
import { rollout, rolloutRequest } from '../helpers/rollout.ts'

// Compares the whole engine (worker, scheduler, native core) with the results of transformers (test/goldens/make.py).

// If the two best logits differ by less, rounding may swap them.
const CLEAR_GAP = { float32: 1e-3, bfloat16: 0.25 }

// Ranks split heads and columns. If there are more ranks than KV heads (olmo2 on 4 ranks), several ranks have the same
// KV head. Norms over a whole projection add up the squares of all ranks.
for (const [name, tp] of [['olmo2', 2], ['olmo2', 4], ['olmo2-bias-tied', 2], ['mistral', 2]] as const) {
  t.test(`${name} generates greedily the same tokens as transformers on ${tp} ranks, in float32`, async t => {
    const { folder, cases } = readGolden(name)
    const engine = await createEngine(folder, { dtype: 'float32', tp, threads: 1, maxTotalTokens: 2048 })
    t.teardown(async () => {
      await engine.close()
    })
    for (const { prompt, greedy, gaps } of cases) {
      const { tokens } = await rollout(engine, rolloutRequest(prompt, { maxNewTokens: 32, temperature: 0 }))
      const unclear = gaps.findIndex(gap => gap < CLEAR_GAP.float32)
      const clear = unclear === -1 ? greedy.length : unclear
      t.same(tokens.slice(0, clear), greedy.slice(0, clear), `prompt of ${prompt.length}: ${clear} clear tokens`)
    }
  })
}

for (const name of goldenNames) {
  const { folder, cases } = readGolden(name)

  for (const dtype of ['float32', 'bfloat16'] as const) {
    t.test(`${name} in ${dtype}`, async t => {
      const engine = await createEngine(folder, { dtype, threads: 1, maxTotalTokens: 2048 })
      t.teardown(async () => {
        await engine.close()
      })

      await t.test('greedy generation equals that of transformers', async t => {
        const results = await Promise.all(
          cases.map(async ({ prompt }) =>
            await rollout(engine, rolloutRequest(prompt, { maxNewTokens: 32, temperature: 0 }))
          )
        )
        for (const [index, { greedy, gaps }] of cases.entries()) {
          const unclear = gaps.findIndex(gap => gap < CLEAR_GAP[dtype])
          const sure = unclear === -1 ? greedy.length : unclear
          t.same(results[index]!.tokens.slice(0, sure), greedy.slice(0, sure), `case ${index}: ${sure} clear tokens`)
        }
      })

      if (dtype === 'float32') await exact(t, engine)
      else await rounded(t, engine)
    })
  }

  async function exact (t: Test, engine: LocalEngine): Promise<void> {
    await t.test(
      'the distribution over the whole vocabulary, and every logprob, equals that of ' +
        'transformers',
      async t => {
        for (const { prompt, greedy, positions, fp32, logprobs } of cases) {
          const every = await distributions(engine, [...prompt, ...greedy])
          for (const [row, position] of positions.entries()) {
            within(t, difference(every[position]!, logSoftmax(fp32[row]!)), 1e-4, `position ${position}`)
          }
          const cold = await firstToken(engine, prompt, 0.7)
          const last = positions.indexOf(prompt.length - 1)
          within(t, difference(cold, logSoftmax(fp32[last]!.map(logit => logit / 0.7))), 1e-4, 'temperature 0.7')
          const tokens = [...prompt, ...greedy]
          const scores = logprobs['1.0'].map((expected, i) => Math.abs(expected - every[i]![tokens[i + 1]!]!))
          within(t, Math.max(...scores), 1e-4, 'every token')
        }
      }
    )
  }

  async function rounded (t: Test, engine: LocalEngine): Promise<void> {
    await t.test('the error against float32 is at most twice that of transformers in bfloat16', async t => {
      for (const { prompt, greedy, positions, fp32, bf16 } of cases) {
        const every = await distributions(engine, [...prompt, ...greedy])
        const [ours, theirs] = [0, 0].map(() => [] as number[]) as [number[], number[]]
        for (const [row, position] of positions.entries()) {
          ours.push(difference(every[position]!, logSoftmax(fp32[row]!)))
          theirs.push(difference(logSoftmax(bf16[row]!), logSoftmax(fp32[row]!)))
        }
        t.ok(Math.max(...ours) > 0, 'it does round')
        within(t, Math.max(...ours), 2 * Math.max(...theirs), `prompt of ${prompt.length}`)
      }
    })
  }
}

const everyId = (engine: LocalEngine): number[] => Array.from({ length: engine.info.vocabSize }, (_, id) => id)

/** Per position of `tokens` but the last: logprobs of every id as the next token. */
async function distributions (engine: LocalEngine, tokens: number[]): Promise<number[][]> {
  const rows: (Scored[] | null)[] = []
  await rollout(engine, rolloutRequest(tokens, { maxNewTokens: 0 }, { startLen: 0, ids: everyId(engine) }), event => {
    rows.push(...event.input?.ids ?? [])
  })
  return rows.slice(1).map(row => row!.map(([logprob]) => logprob))
}

async function firstToken (engine: LocalEngine, prompt: number[], temperature: number): Promise<number[]> {
  let row: Scored[] = []
  await rollout(engine, rolloutRequest(prompt, { maxNewTokens: 1, temperature }, { ids: everyId(engine) }), event => {
    row = event.ids[0] ?? row
  })
  return row.map(([logprob]) => logprob)
}

function logSoftmax (logits: Float64Array): Float64Array {
  const max = Math.max(...logits)
  const sum = logits.reduce((total, logit) => total + Math.exp(logit - max), 0)
  return logits.map(logit => logit - max - Math.log(sum))
}

function difference (got: ArrayLike<number>, expected: Float64Array): number {
  return Math.max(...expected.map((value, i) => Math.abs(value - got[i]!)))
}

function within (t: Test, difference: number, limit: number, what: string): void {
  t.ok(difference <= limit, `${what}: ${difference.toExponential(1)} of ${limit.toExponential(1)}`)
}
