import t from 'tap'
import { StepCost } from '../../src/engine/speculation/step-cost.ts'

/** The share after steps of these counts of tokens, which take `base + slope * tokens` ms each. */
function share (base: number, slope: number, counts: number[], at: number): number {
  const cost = new StepCost()
  for (let i = 0; i < 300; i++) {
    const tokens = counts[i % counts.length]!
    cost.observe(tokens, base + slope * tokens, i % 2 > 0)
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

/** A cost after steps of 8 to 10 tokens, and of 24 with guesses that take `lost` ms more than the others' line. */
function withLoss (lost: number): StepCost {
  const cost = new StepCost()
  for (let i = 0; i < 300; i++) {
    const isGuessing = i % 2 === 0
    const tokens = isGuessing ? 24 : 8 + i % 3
    cost.observe(tokens, 40 + tokens + (isGuessing ? lost : 0), isGuessing)
  }
  return cost
}

t.test('guesses are worth it if they raise the rate of tokens', async t => {
  // 8 tokens take 48 ms, 24 take 64 ms: 2.7 right ones would do.
  const cost = withLoss(0)
  t.ok(cost.isWorth(8, 16, 3.5))
  t.notOk(cost.isWorth(8, 16, 2))
})

t.test('steps with guesses have a cost of their own, and the slope is common', async t => {
  const cost = withLoss(16)
  t.ok(Math.abs(cost.shareOfToken(8) - 8 / 64) < 0.03, String(cost.shareOfToken(8)))
  // 8 tokens take 48 ms, 24 take 80 ms: 5.4 right ones would do.
  t.notOk(cost.isWorth(8, 16, 4.5))
  t.ok(cost.isWorth(8, 16, 6.5))
})

t.test('guesses that were too slow are tried again after a while', async t => {
  const cost = withLoss(100)
  t.notOk(cost.isWorth(8, 16, 8))
  let steps = 0
  for (; steps < 1000 && !cost.isWorth(8, 16, 8); steps++) cost.observe(8, 48, false)
  t.ok(steps > 50 && steps < 500, String(steps))
  t.notOk(cost.isWorth(8, 16, 1), 'not those that could gain nothing')
  let tries = 0
  for (; tries < 100 && cost.isWorth(8, 16, 8); tries++) cost.observe(24, 164, true)
  t.ok(tries < 10, `${tries} tries`)
})

t.test('steps without guesses are tried again where guesses have gained for long', async t => {
  const cost = withLoss(16)
  let tries = 0
  for (let i = 0; i < 2000; i++) {
    // Contexts grow: all steps take up to twice as long.
    const factor = 1 + i / 2000
    const isGuessing = cost.isWorth(8, 16, 8)
    tries += isGuessing ? 0 : 1
    cost.observe(isGuessing ? 24 : 8, factor * (isGuessing ? 80 : 48), isGuessing)
  }
  t.ok(tries > 20 && tries < 120, `${tries} tries`)
  while (!cost.isWorth(8, 16, 8)) cost.observe(8, 96, false)
  t.ok(cost.isWorth(8, 16, 7.5), 'guesses still gain')
  t.notOk(cost.isWorth(8, 16, 4.5), 'and what they cost is not forgotten')
})

t.test('before any step a guess costs as between a CPU and a GPU', async t => {
  const cost = new StepCost()
  t.ok(cost.isWorth(1, 16, 4))
  t.notOk(cost.isWorth(1, 16, 0.1))
  t.notOk(cost.isWorth(200, 16, 10))
})

t.test('the first steps of each size, which are slow on a GPU, teach nothing', async t => {
  const cost = new StepCost()
  for (let i = 0; i < 50; i++) cost.observe(8, 48, false)
  for (const tokens of [16, 24, 40, 64, 96]) {
    for (let i = 0; i < 2; i++) {
      t.ok(cost.isWorth(8, 16, 8), `step ${i} of ${tokens} tokens`)
      cost.observe(tokens, 900, true)
    }
  }
  for (let i = 0; i < 50; i++) cost.observe(24, 300, true)
  t.notOk(cost.isWorth(8, 16, 8), 'later ones do')
})

t.test('one step that took very long does not end guessing', async t => {
  const cost = withLoss(0)
  cost.observe(24, 2000, true)
  t.ok(cost.isWorth(8, 16, 8))
})

t.test('a time that grows faster than tokens do leads to no time below 0', async t => {
  const cost = new StepCost()
  const ms = (tokens: number): number => 4 + 0.0004 * tokens * tokens
  for (let i = 0; i < 400; i++) cost.observe(256 - i % 100, ms(256 - i % 100), false)
  // 256 tokens took 30 ms; four take as long as one.
  for (let i = 0; i < 40; i++) {
    cost.observe(4, ms(4), false)
    if (i > 20) t.ok(cost.isWorth(4, 28, 20), `step ${i}`)
  }
  t.ok(cost.shareOfToken(4) < 0.5, String(cost.shareOfToken(4)))
})
