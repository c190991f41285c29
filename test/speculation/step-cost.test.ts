import t from 'tap'
import { StepCost } from '../../src/engine/speculation/step-cost.ts'

/** The share after steps of these counts of tokens, which take `base + slope * tokens` ms each. */
function share (base: number, slope: number, counts: number[], at: number): number {
  const cost = new StepCost()
  for (let i = 0; i < 300; i++) {
    const tokens = counts[i % counts.length]!
    cost.observe(tokens, base + slope * tokens)
  }
  return cost.shareOfToken(at)
}

t.test('the share of a token is its part of the time that one takes', async t => {
  // 40 ms and 3 ms a token: at 8 tokens 64 ms, 8 ms for each.
  const expected = 3 / 8
  t.ok(Math.abs(share(40, 3, [8, 20, 40, 72], 8) - expected) < 0.02)
  t.ok(share(40, 3, [1, 9, 17], 1) < 0.1, 'a step of one token has room')
  t.ok(share(0, 3, [8, 30, 60], 8) > 0.95, 'where time grows as tokens do there is none')
  t.ok(share(40, 0, [8, 30, 60], 8) < 0.02, 'where it does not grow there is')
})

t.test('without steps of different counts it begins at a guess between a CPU and a GPU', async t => {
  const start = new StepCost().shareOfToken(16)
  t.ok(start > 0.1 && start < 0.4, String(start))
  const same = share(40, 3, [16], 16)
  t.ok(same > 0.1 && same < 0.4, String(same))
  t.equal(share(0, 0, [16], 16), start, 'a clock that stands still teaches nothing')
})

t.test('steps that get slower with more tokens are never a gain below nothing', async t => {
  t.equal(share(100, -1, [8, 30, 60], 8), 0)
})
