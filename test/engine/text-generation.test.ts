import t from 'tap'
import { generateText } from '../../src/engine/text-generation.ts'
import { StopPatterns } from '../../src/engine/stop-patterns.ts'
import type { TextEvent, TextStopOptions } from '../../src/engine/text-generation.ts'
import type { FinishReason, GenerateRequest, TokenEvent } from '../../src/contract/rollout-engine.ts'
import { makeRequest } from '../helpers/scheduler-harness.ts'

// Token n is the n-th of these texts. The detokenizer holds back half an emoji, as a real one does.
const PIECES = ['a', 'b', 'ST', 'OP', '[half', 'half]', '</s>', 'STOPx']

function detokenizer (): { push: (ids: ArrayLike<number>) => string, flush: () => string } {
  let waiting = ''
  return {
    push: (ids) => {
      let text = ''
      for (const id of Array.from(ids)) {
        if (PIECES[id] === '[half') waiting = '[half'
        else {
          text += waiting + PIECES[id]!
          waiting = ''
        }
      }
      return text
    },
    flush: () => {
      const text = waiting === '' ? '' : '\ufffd'
      waiting = ''
      return text
    }
  }
}

class ScriptedEngine {
  left = false
  readonly aborted: string[] = []
  readonly #steps: number[][]
  readonly #finish: FinishReason
  constructor (steps: number[][], finish: FinishReason) {
    this.#steps = steps
    this.#finish = finish
  }

  abort (rid: string): boolean {
    this.aborted.push(rid)
    return true
  }

  async *generate (request: GenerateRequest): AsyncGenerator<TokenEvent> {
    let completionTokens = 0
    try {
      for (const [i, tokens] of this.#steps.entries()) {
        completionTokens += tokens.length
        yield {
          tokens,
          logprobs: tokens.map((token) => [-token, token]),
          top: tokens.map((token) => [[-token, token]]),
          ids: tokens.map(() => []),
          input: null,
          weightVersion: 'v',
          promptTokens: request.inputIds.length,
          cachedTokens: 0,
          completionTokens,
          retractions: 0,
          seed: 1n,
          finish: i === this.#steps.length - 1 ? this.#finish : null
        }
      }
    } finally {
      this.left = true
    }
  }
}

const LENGTH: FinishReason = { type: 'length', length: 9 }

async function run (
  steps: number[][],
  finish: FinishReason,
  options: Partial<TextStopOptions> = {},
  minNewTokens = 0
): Promise<{ events: TextEvent[], text: string, tokens: number[], finish: FinishReason | null, left: boolean }> {
  const engine = new ScriptedEngine(steps, finish)
  const events: TextEvent[] = []
  for await (
    const event of generateText(engine, makeRequest([1], { minNewTokens }), detokenizer(), {
      stop: [],
      noStopTrim: false,
      ...options
    })
  ) events.push(event)
  return {
    events,
    text: events.map((e) => e.text).join(''),
    tokens: events.flatMap((e) => e.tokens),
    finish: events.at(-1)!.finish,
    left: engine.left
  }
}

t.test('text comes with the tokens that complete it, broken characters at the end', async (t) => {
  const got = await run([[0], [4], [5], [1, 4]], LENGTH)
  t.same(got.events.map((e) => e.text), ['a', '', '[halfhalf]', 'b\ufffd'])
  t.same(got.finish, LENGTH)
})

t.test('a stop string ends the request with the token that completes it', async (t) => {
  const got = await run([[0], [2], [3], [1], [1]], LENGTH, { stop: ['STOP'] })
  t.same(got.events.map((e) => [e.text, e.tokens]), [['a', [0]], ['', [2]], ['', [3]]])
  t.same(got.finish, { type: 'stop', matched: 'STOP' })
  t.ok(got.left, "the engine's request is aborted")
})

t.test('tokens behind the match are cut from the same event, with their logprobs', async (t) => {
  const got = await run([[0, 2, 3, 1, 1], [1]], LENGTH, { stop: ['STOP'] })
  t.same(got.events.length, 1)
  const [event] = got.events
  t.same(event!.tokens, [0, 2, 3])
  t.same(event!.logprobs, [[-0, 0], [-2, 2], [-3, 3]])
  t.same([event!.top.length, event!.ids.length, event!.completionTokens, event!.text], [3, 3, 3, 'a'])
})

t.test('the rest of the token that completes a stop string is cut from the text', async (t) => {
  t.equal((await run([[0], [7], [1]], LENGTH, { stop: ['STOP'] })).text, 'a')
  t.equal((await run([[0], [7], [1]], LENGTH, { stop: ['STOP'], noStopTrim: true })).text, 'aSTOP')
})

t.test('text that was held back and completes no stop string comes at the end', async (t) => {
  t.equal((await run([[0], [2]], LENGTH, { stop: ['STOP'] })).text, 'aST')
  t.equal((await run([[0], [2]], { type: 'abort', message: 'Aborted' }, { stop: ['STOP'] })).text, 'aST')
})

t.test('the text of a stop token is left out, unless it is requested', async (t) => {
  const stop: FinishReason = { type: 'stop', matched: 6 }
  t.equal((await run([[0], [1, 6]], stop)).text, 'ab')
  t.same((await run([[0], [1, 6]], stop)).tokens, [0, 1, 6])
  t.equal((await run([[0], [1, 6]], stop, { noStopTrim: true })).text, 'ab</s>')
})

t.test('stop strings are ignored before the minimum number of tokens', async (t) => {
  t.same((await run([[2], [3], [0], [2], [3], [0]], LENGTH, { stop: ['STOP'] }, 4)).tokens, [2, 3, 0, 2, 3])
  t.same((await run([[2], [3], [0]], LENGTH, { stop: ['STOP'] }, 2)).tokens, [2, 3])
})

t.test('a stop string wins over an end by length at the same token', async (t) => {
  t.same((await run([[2], [3]], LENGTH, { stop: ['STOP'] })).finish, { type: 'stop', matched: 'STOP' })
})

t.test('without a detokenizer there are tokens and no text', async (t) => {
  const events: TextEvent[] = []
  for await (
    const event of generateText(new ScriptedEngine([[2], [3]], LENGTH), makeRequest([1]), null, {
      stop: [],
      noStopTrim: false
    })
  ) events.push(event)
  t.same(events.map((e) => [e.text, e.tokens]), [['', [2]], ['', [3]]])
})

t.test('leaving the loop early aborts the request', async (t) => {
  const engine = new ScriptedEngine([[0], [1], [1]], LENGTH)
  const stream = generateText(engine, makeRequest([1]), detokenizer(), { stop: [], noStopTrim: false })
  await stream.next()
  t.notOk(engine.left)
  await stream.return()
  t.ok(engine.left)
})

t.test('a pattern ends the request with the token that completes a match, which stays in the text', async (t) => {
  const patterns = new StopPatterns(['T+O', 'b+a'])
  const got = await run([[0], [2], [3], [1]], LENGTH, { patterns })
  t.same(got.events.map((e) => [e.text, e.tokens]), [['a', [0]], ['ST', [2]], ['OP', [3]]])
  t.same(got.finish, { type: 'stop', matched: 'T+O' })
  t.ok(got.left, "the engine's request is aborted")
  t.same((await run([[0], [1, 0, 1]], LENGTH, { patterns })).tokens, [0, 1, 0], 'tokens behind the match are cut')
})

t.test('a pattern at the beginning or the end of the text matches there alone', async (t) => {
  const ends = async (pattern: string, ...steps: number[][]): Promise<number[]> =>
    (await run(steps, LENGTH, { patterns: new StopPatterns([pattern]) })).tokens
  t.same(await ends('^a?b', [0], [1], [1]), [0, 1])
  t.same(await ends('^b', [0], [1], [1]), [0, 1, 1])
  t.same(await ends('O$', [7], [3], [0]), [7, 3, 0])
  t.same(await ends('[OP]+x?$', [7], [0], [3], [0]), [7])
  t.same(await ends('a.b', [0], [5], [4], [5], [1], [0]), [0, 5, 4, 5, 1, 0])
})

t.test('patterns are ignored before the minimum number of tokens, and stop strings win at one token', async (t) => {
  const patterns = new StopPatterns(['a|x'])
  t.same((await run([[0], [1], [1], [0], [1]], LENGTH, { patterns }, 2)).tokens, [0, 1, 1, 0])
  const both = await run([[0], [1]], LENGTH, { patterns: new StopPatterns(['[ab]']), stop: ['a'] })
  t.same([both.finish, both.text], [{ type: 'stop', matched: 'a' }, ''])
  const held = await run([[2], [0], [1]], LENGTH, { patterns, stop: ['STax'] })
  t.same([held.finish, held.text], [{ type: 'stop', matched: 'a|x' }, 'STa'], 'text that was held back is shown')
})

t.test('special tokens that are not in the text can match a pattern', async (t) => {
  const patterns = new StopPatterns(['b<.*>'])
  const special = (token: number): string => token === 6 ? '<end>' : ''
  t.same((await run([[1], [6], [0]], LENGTH, { patterns, special })).tokens, [1, 6])
})

t.test('patterns that no text can be searched for in linear time are refused', (t) => {
  for (
    const [patterns, message] of [
      [['(a)\\1'], /stop_regex: the reference .* is not supported/],
      [['a(?=b)'], /not supported: look-around/],
      [['a*'], /matches the empty text/],
      [[''], /matches the empty text/],
      [['('], /in the pattern "\("/],
      [['(a|b){5000}'], /repeats too much/],
      [['a'.repeat(257)], /at most 256 bytes for a pattern, got 257/],
      [Array<string>(33).fill('a+'), /at most 32 patterns, got 33/]
    ] as const
  ) t.throws(() => new StopPatterns([...patterns]), { code: 'INVALID_REQUEST', message })
  const slow = new StopPatterns(['(a+)+b', '(a|aa)+c']).matcher()
  t.equal(slow.push('a'.repeat(100_000)), null)
  t.equal(slow.push('c'), '(a|aa)+c')
  t.end()
})
