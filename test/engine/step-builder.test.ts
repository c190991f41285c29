import t from 'tap'
import { Sequence } from '../../src/engine/sequences/sequence.ts'
import { StepBuilder } from '../../src/engine/scheduling/step-builder.ts'
import type { SamplingParams } from '../../src/contract/rollout-engine.ts'
import { ROW_FLOATS, ROW_INTS } from '../../src/native/step.ts'
import { makeRequest } from '../helpers/scheduler-harness.ts'

const LIMITS = { contextLength: 1000, vocabSize: 100, eosTokenIds: [0] }

/** A sequence with its whole prompt computed, ready to sample its next token. */
function decoding (id: number, prompt: number[], sampling: Partial<SamplingParams> = {}): Sequence {
  const seq = new Sequence(id, makeRequest(prompt, sampling), id, BigInt(1000 + id), LIMITS)
  seq.computed = prompt.length - 1
  seq.addPage(id)
  return seq
}

t.test('every row of a large batch keeps its own seed, also when the batch grows between two steps', async t => {
  const builder = new StepBuilder()
  for (const count of [3, 64, 65, 200, 1]) {
    builder.clear()
    for (let id = 0; id < count; id++) builder.add(decoding(id, [1, 2, id % 50]), 1, 1)
    const { rowSeeds, tokens, rowInts, rowFloats } = builder.batch()
    t.same([...rowSeeds], Array.from({ length: count }, (_, id) => BigInt(1000 + id)), `${count} rows`)
    t.same([...tokens], Array.from({ length: count }, (_, id) => id % 50))
    t.equal(rowInts.length, count * ROW_INTS)
    t.equal(rowFloats.length, count * ROW_FLOATS)
  }
})

t.test('end tokens are banned below min_new_tokens, and not from there on', async t => {
  const builder = new StepBuilder()
  const seq = decoding(0, [1, 2], { minNewTokens: 2, stopTokenIds: [7] })
  for (const banned of [true, true, false, false]) {
    builder.clear()
    builder.add(seq, 1, 1)
    const { biasTokens, biasValues, biasOffsets } = builder.batch()
    t.same([...biasTokens].sort(), banned ? [0, 7] : [], `after ${seq.completion} tokens`)
    t.ok(biasValues.every(value => value === -Infinity))
    t.same([...biasOffsets], [0, biasTokens.length])
    seq.addBegun(-1, -1)
    seq.computed++
    seq.append(5)
  }
})

t.test('the token that would complete a bad word is banned, and only behind the rest of the word', async t => {
  const builder = new StepBuilder()
  const banned = (output: number[], badWords: number[][]): number[] => {
    const seq = decoding(0, [3, 4], { badWords })
    for (const token of output) {
      seq.append(token)
      seq.computed++
    }
    builder.clear()
    builder.add(seq, 1, 1)
    return [...builder.batch().biasTokens]
  }
  t.same(banned([], [[9]]), [9], 'a word of one token is always banned')
  t.same(banned([5], [[5, 6]]), [6])
  t.same(banned([5, 8], [[5, 6]]), [])
  t.same(banned([1, 5, 6], [[5, 6, 7], [6, 8], [1, 5, 6]]), [7, 8])
  t.same(banned([4], [[4, 4, 9]]), [], 'the prompt is no part of the word')
})
