import t from 'tap'
import type { Test } from 'tap'
import { ARCHITECTURES } from '../../src/model/families.ts'
import { readArchitecture } from '../../src/model/read-config.ts'
import { buildModelTable } from '../../src/model/model-table.ts'
import { goldenNames, readGolden } from '../helpers/goldens.ts'
import type { GoldenCase } from '../helpers/goldens.ts'
import { Oracle, readWeights } from '../helpers/oracle.ts'

const maxOf = (values: Iterable<number>): number => {
  let max = 0
  for (const value of values) max = Math.max(max, Math.abs(value))
  return max
}

function checkLogits (t: Test, oracle: Oracle, golden: GoldenCase): void {
  const ours = oracle.logits(golden.prompt)
  golden.positions.forEach((position, row) => {
    const theirs = golden.fp32[row]!
    const error = maxOf(theirs.map((x, i) => x - ours[position]![i]!))
    t.ok(error <= 2e-4 * maxOf(theirs), `position ${position} of ${golden.prompt.length}: error ${error}`)
  })
}

t.test('the golden folder has every architecture', async t => {
  const names = await Promise.all(goldenNames.map(async name => (await readArchitecture(readGolden(name).folder)).name))
  t.same([...new Set(names)].sort(), [...ARCHITECTURES].sort())
})

for (const name of goldenNames) {
  t.test(`the float64 oracle gives the same results as transformers for ${name}`, async t => {
    const { folder, cases, rope } = readGolden(name)
    const arch = await readArchitecture(folder)
    const weights = readWeights(folder)
    const oracle = new Oracle(arch, weights)
    const wanted = [...buildModelTable(arch, 1).tensors.values()].filter(plan => !plan.alternative)
    t.same(
      [...weights.keys()].sort(),
      wanted.map(plan => plan.name).sort(),
      'the table has exactly the names that save_pretrained writes'
    )
    for (const plan of wanted) {
      t.equal(
        weights.get(plan.name)?.length,
        plan.rows * plan.cols,
        `${plan.name} has its size`
      )
    }
    t.ok(maxOf(rope.invFreq.map((f, i) => f / arch.ropeInvFreq[i]! - 1)) < 1e-6, 'inverse frequencies')
    t.ok(Math.abs(rope.scale - arch.ropeScale) < 1e-6, 'attention factor')
    for (const golden of cases) {
      checkLogits(t, oracle, golden)
      const tokens = [...golden.prompt, ...golden.greedy]
      for (const [temperature, theirs] of Object.entries(golden.logprobs)) {
        const ours = oracle.logprobs(tokens, Number(temperature))
        t.ok(maxOf(theirs.map((x, i) => x - ours[i]!)) < 1e-4, `logprobs at temperature ${temperature}`)
      }
      const logits = oracle.logits(tokens)
      golden.greedy.forEach((token, i) => {
        if (golden.gaps[i]! < 1e-3) return
        const row = logits[golden.prompt.length - 1 + i]!
        t.equal(row.indexOf(Math.max(...row)), token, `greedy token ${i}`)
      })
    }
  })
}
