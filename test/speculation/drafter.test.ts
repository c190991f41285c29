import t from 'tap'
import { Drafter } from '../../src/engine/speculation/drafter.ts'
import { GuessRates } from '../../src/engine/speculation/guess-rates.ts'
import { Sequence } from '../../src/engine/sequences/sequence.ts'
import { stepCounters } from '../../src/engine/step-counters.ts'
import type { GenerateRequest, SamplingParams } from '../../src/contract/rollout-engine.ts'
import { makeRequest } from '../helpers/scheduler-harness.ts'

const LIMITS = { contextLength: 4000, vocabSize: 50_000, eosTokenIds: [0] }
const PROMPT = [11, 12, 13, 14]
let made = 0

interface Options {
  prompt?: number[]
  sampling?: Partial<SamplingParams>
  request?: Partial<GenerateRequest>
}

function sequence ({ prompt = PROMPT, sampling = {}, request = {} }: Options = {}): Sequence {
  const whole = { ...makeRequest(prompt, { maxNewTokens: 1000, ignoreEos: true, ...sampling }), ...request }
  return new Sequence(made++, whole, made, 1n, LIMITS)
}

/** A sequence that follows `drafter` and has generated these tokens. */
function after (drafter: Drafter, tokens: number[], options: Options = {}): Sequence {
  const seq = sequence(options)
  drafter.join(seq)
  for (const token of tokens) seq.append(token)
  return seq
}

/** Ends an output of the same prompt. */
function ended (drafter: Drafter, tokens: number[], options: Options = {}): void {
  drafter.leave(after(drafter, tokens, options))
}

const newDrafter = (most = 16): Drafter => new Drafter(most, stepCounters())
const draftOf = (drafter: Drafter, seq: Sequence, room = 1000): readonly number[] | undefined =>
  drafter.choose([seq], room, () => 1000).get(seq)
const range = (from: number, count: number): number[] => Array.from({ length: count }, (_, i) => from + i)

t.test('an output goes on as one that runs, or that has ended, with the same prompt', async t => {
  for (const keep of [ended, after]) {
    const drafter = newDrafter()
    keep(drafter, range(100, 6))
    const seq = after(drafter, [])
    t.same(draftOf(drafter, seq)!.slice(0, 3), [100, 101, 102], 'from its first token on')
    seq.append(100)
    t.same(draftOf(drafter, seq)!.slice(0, 3), [101, 102, 103])
    seq.append(300)
    t.equal(draftOf(drafter, seq), undefined)
  }
})

t.test('prompts, adapters and cache salts are apart', async t => {
  for (
    const other of [
      { prompt: [11, 12, 13, 15] },
      { prompt: [11, 12, 13, 14, 14] },
      { request: { adapter: 'a' } },
      { request: { cacheSalt: 'a' } }
    ]
  ) {
    const drafter = newDrafter()
    ended(drafter, [14, 100, 101, 102], other)
    t.equal(draftOf(drafter, after(drafter, [14, 100, 101])), undefined, JSON.stringify(other))
    t.ok(draftOf(drafter, after(drafter, [14, 100, 101], other)), JSON.stringify(other))
  }
})

t.test('requests with penalties take no drafts', async t => {
  for (const sampling of [{ frequencyPenalty: 0.1 }, { presencePenalty: 0.1 }, { repetitionPenalty: 1.1 }]) {
    const drafter = newDrafter()
    ended(drafter, range(100, 6))
    t.equal(draftOf(drafter, after(drafter, [100, 101, 102], { sampling })), undefined)
  }
})

/** Lets a drafter guess an output again that is the same but for one of `period` tokens. */
function practise (drafter: Drafter, period = Infinity): void {
  const prompt = [period === Infinity ? 90 : 91, 1, 2]
  ended(drafter, range(5000, 400), { prompt })
  const seq = after(drafter, [], { prompt })
  for (let i = 0; i < 400; i++) {
    draftOf(drafter, seq)
    seq.append(i % period === period - 1 ? 9999 : 5000 + i)
  }
  drafter.leave(seq)
}

t.test('drafts get shorter where guesses fail, computed or not, and longer where they are right', async t => {
  const drafter = newDrafter()
  ended(drafter, range(100, 60))
  // Three tokens match.
  const seq = after(drafter, [7, 8, 100, 101, 102])
  const length = (): number => draftOf(drafter, seq)?.length ?? 0
  const first = length()
  t.ok(first > 3 && first < 16, String(first))
  practise(drafter)
  const right = length()
  t.equal(right, 16, 'up to the limit')
  for (let i = 0; i < 8; i++) practise(drafter, 4)
  const wrong = length()
  t.ok(wrong < first, String(wrong))
})

t.test('classes of guesses learn apart', async t => {
  const rates = new GuessRates()
  const [short, long, split] = [rates.classOf(3, 1), rates.classOf(20, 1), rates.classOf(20, 0.6)]
  t.equal(new Set([short, long, split, rates.classOf(20, 0.4), rates.classOf(8, 0.6)]).size, 5)
  t.equal(rates.classOf(4, 1), rates.classOf(5, 1))
  for (let i = 0; i < 1000; i++) {
    rates.learn(short, i % 4 === 0)
    rates.learn(long, true)
  }
  t.ok(Math.abs(rates.of(short) - 0.25) < 0.02)
  t.ok(rates.of(long) > 0.98)
  t.ok(rates.of(long) < 1, 'none is certain')
  t.ok(Math.abs(rates.of(split) - 0.8) < 1e-9)
})

t.test('the likeliest tokens of all get the room', async t => {
  const drafter = newDrafter()
  ended(drafter, range(100, 60))
  // Matches of 30 tokens and of 3.
  const [sure, unsure] = [after(drafter, range(100, 30)), after(drafter, [7, 8, 120, 121, 122])]
  practise(drafter)
  practise(drafter, 8)
  const alone = drafter.choose([unsure], 12, () => 1000).get(unsure)!.length
  const drafts = drafter.choose([sure, unsure], 12, () => 1000)
  const [a, b] = [drafts.get(sure)?.length ?? 0, drafts.get(unsure)?.length ?? 0]
  t.ok(a > b && b < alone && a + b <= 12 && a + b > 8, `${a} and ${b}, alone ${alone}`)
  t.equal(drafter.choose([sure, unsure], 0, () => 1000).size, 0)
  t.equal(drafter.choose([sure], 100, () => 2).get(sure)!.length, 2, 'at most as many as a sequence may take')
})

t.test('guesses that are as likely as others get the room that is left', async t => {
  for (const rounds of [0, 60]) {
    const drafter = newDrafter()
    // A class whose guesses have all been right.
    for (let i = 0; i < rounds; i++) practise(drafter)
    const all = range(0, 20).flatMap(i => {
      const prompt = [i, 1, 2]
      ended(drafter, range(100, 60), { prompt })
      return Array.from({ length: 8 }, () => after(drafter, range(100, 30), { prompt }))
    })
    for (let i = 0; i < 40; i++) drafter.timed({ tokens: 160 + i % 8, isGuessing: false, onlySamples: true }, 5)
    const tokens = [...drafter.choose(all, 1000, () => 1000).values()].flat().length
    t.equal(tokens, 256 - 160, `${tokens} guesses after ${rounds} rounds`)
  }
})

t.test('a few guesses for one of many sequences are not worth it', async t => {
  const drafter = newDrafter()
  ended(drafter, range(100, 60))
  const seq = after(drafter, range(100, 4))
  const others = Array.from({ length: 100 }, (_, i) => after(drafter, [], { prompt: [i, 1, 2] }))
  t.equal(drafter.choose([seq, ...others], 1000, () => 1000).size, 0)
  t.equal(drafter.choose([seq, ...others.slice(0, 5)], 1000, () => 1000).size, 1)
})

t.test('drafts follow the token of a step under way', async t => {
  const drafter = newDrafter()
  ended(drafter, range(100, 60))
  const seq = after(drafter, range(100, 4))
  const known = draftOf(drafter, seq)!
  seq.addBegun(1, 1)
  t.same(draftOf(drafter, seq), known.slice(1))
})

t.test('of one prompt the last outputs are kept, and an index does not grow with those that ended', async t => {
  const drafter = newDrafter()
  const live = after(drafter, [])
  for (let i = 0; i < 200; i++) {
    ended(drafter, range(1000 + i * 10, 9))
    draftOf(drafter, live)
  }
  t.equal(draftOf(drafter, after(drafter, [1000, 1001, 1002])), undefined, 'the first is forgotten')
  t.ok(draftOf(drafter, after(drafter, [2990, 2991, 2992])))
  t.ok(draftOf(drafter, after(drafter, [2890, 2891, 2892])))
})

t.test('requests without an output leave nothing, and short ones not more than their memory', async t => {
  const drafter = newDrafter()
  ended(drafter, range(100, 60))
  for (let i = 0; i < 20_000; i++) {
    const scored = sequence({ prompt: [i, 1, 2], sampling: { maxNewTokens: 0 } })
    drafter.join(scored)
    drafter.leave(scored)
    ended(drafter, [], { prompt: [i, 3, 4] })
  }
  t.ok(draftOf(drafter, after(drafter, range(100, 4))))
  for (let i = 0; i < 8000; i++) ended(drafter, [1], { prompt: [i, 1, 2] })
  t.equal(draftOf(drafter, after(drafter, range(100, 4))), undefined, '8,000 prompts count as 4.6 million tokens')
})

t.test('texts that ended are found while others run, and are forgotten beside them when memory is short', async t => {
  const drafter = newDrafter()
  const running = after(drafter, [])
  ended(drafter, range(100, 60))
  t.ok(draftOf(drafter, after(drafter, range(100, 4))))
  for (let i = 0; i < 8000; i++) ended(drafter, [1], { prompt: [i, 1, 2] })
  t.equal(draftOf(drafter, after(drafter, range(100, 4))), undefined)
  drafter.leave(running)
})

t.test('prompts that were not used for long are forgotten first, and none that runs', async t => {
  const drafter = newDrafter()
  const long = { sampling: { maxNewTokens: 250_000 }, request: {} }
  const limits = { ...LIMITS, contextLength: 500_000 }
  const big = (prompt: number): Sequence => {
    const { request } = sequence({ prompt: [prompt, 1, 2], ...long })
    const seq = new Sequence(made++, request, made, 1n, limits)
    drafter.join(seq)
    for (let i = 0; i < 250_000; i++) seq.append(i % 49_000)
    return seq
  }
  const probe = (prompt: number): boolean => {
    const seq = after(drafter, [5, 6, 7], { prompt: [prompt, 1, 2] })
    const found = draftOf(drafter, seq) !== undefined
    drafter.leave(seq)
    return found
  }
  const running = big(0)
  for (let prompt = 1; prompt <= 14; prompt++) drafter.leave(big(prompt))
  t.ok(probe(1), '3.5 million tokens are kept')
  for (let prompt = 15; prompt <= 18; prompt++) drafter.leave(big(prompt))
  t.notOk(probe(2), 'over 4.2 million the oldest go')
  t.ok(probe(1), 'it was used since')
  t.ok(probe(0))
  drafter.leave(running)
})

t.test('a step that waited for guesses in vain does not count as one without', async t => {
  const drafter = newDrafter()
  ended(drafter, range(100, 60))
  const seq = after(drafter, range(100, 4))
  const others = Array.from({ length: 15 }, (_, i) => after(drafter, [], { prompt: [i, 1, 2] }))
  const isGuessed = (): boolean => drafter.choose([seq, ...others], 1000, () => 1000).size > 0
  const step = (tokens: number, isGuessing: boolean): { tokens: number, isGuessing: boolean, onlySamples: true } => ({
    tokens,
    isGuessing,
    onlySamples: true
  })
  for (let i = 0; i < 60; i++) {
    drafter.timed(step(16, false), 50)
    drafter.timed(step(32, true), 120)
  }
  t.notOk(isGuessed(), 'guesses cost too much')
  // Steps without guesses that overlap with nothing take as long.
  for (let i = 0; i < 60; i++) {
    drafter.awaits(new Map([[seq, [1]]]))
    drafter.timed(step(16, false), i === 0 ? 50 : 120)
  }
  t.notOk(isGuessed(), 'they still do')
  for (let i = 0; i < 60; i++) drafter.timed(step(16, false), 120)
  t.ok(isGuessed(), 'all steps take as long')
})
