import t from 'tap'
import { NewTokenRatio } from '../../src/engine/scheduling/new-token-ratio.ts'
import { Sequence } from '../../src/engine/sequences/sequence.ts'
import { makeRequest } from '../helpers/scheduler-harness.ts'

const LIMITS = { contextLength: 100_000, vocabSize: 10, eosTokenIds: [] }

function sequence (maxNewTokens: number, generated = 0): Sequence {
  const seq = new Sequence(0, makeRequest([1, 2], { maxNewTokens }), 0, 0n, LIMITS)
  for (let i = 0; i < generated; i++) seq.append(1)
  return seq
}

t.test('at first, 0.7 of the tokens that a request may still generate count, of at most 4096', async (t) => {
  const ratio = new NewTokenRatio()
  t.equal(ratio.estimate(sequence(100)), 70)
  t.equal(ratio.estimate(sequence(100, 40)), 0.7 * 60)
  t.equal(ratio.estimate(sequence(90_000)), 0.7 * 4096)
})

t.test('the ratio falls with steps to a minimum and is reset when nothing runs', async (t) => {
  const ratio = new NewTokenRatio()
  ratio.decay()
  t.ok(ratio.value < 0.7)
  for (let i = 0; i < 1000; i++) ratio.decay()
  t.ok(Math.abs(ratio.value - 0.098) < 1e-9)
  ratio.reset()
  t.equal(ratio.value, 0.7)
})

t.test('a retraction raises the ratio to the progress of the running requests, at most to 1', async (t) => {
  const ratio = new NewTokenRatio()
  for (let i = 0; i < 600; i++) ratio.decay()
  ratio.retracted([sequence(100, 30), sequence(100, 10)])
  t.equal(ratio.value, 80 / 200)
  ratio.retracted([sequence(10, 9)])
  t.equal(ratio.value, 1)
  ratio.retracted([sequence(1000)])
  t.equal(ratio.value, 1, 'it does not fall')
})
