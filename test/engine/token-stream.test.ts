import t from 'tap'
import { RefitError } from '../../src/errors.ts'
import { TokenStream } from '../../src/engine/token-stream.ts'
import type { TokenEvent } from '../../src/contract/rollout-engine.ts'

const event = (token: number, ends = false): TokenEvent => ({
  tokens: [token],
  logprobs: [],
  top: [],
  ids: [],
  input: null,
  weightVersion: '1',
  promptTokens: 1,
  cachedTokens: 0,
  completionTokens: token,
  retractions: 0,
  seed: 0n,
  finish: ends ? { type: 'length', length: token } : null
})

function streamOf (): { stream: TokenStream, calls: string[] } {
  const calls: string[] = []
  const stream = new TokenStream({
    begin: () => {
      calls.push('begin')
    },
    leave: () => {
      calls.push('leave')
    }
  })
  return { stream, calls }
}

const failure = new RefitError('ENGINE_TORN', 'torn')

t.test('an error comes after the events before it, whether or not the reader waits, and comes once', async t => {
  for (const waits of [true, false]) {
    const { stream } = streamOf()
    const first = stream.next()
    stream.push(event(1))
    t.same((await first).value!.tokens, [1])
    const next = waits ? stream.next() : undefined
    if (!waits) stream.push(event(2))
    stream.fail(failure)
    if (!waits) t.same((await stream.next()).value.tokens, [2])
    await t.rejects(next ?? stream.next(), failure)
    t.same(await stream.next(), { done: true, value: undefined })
  }
})

t.test('the first read begins the request, an early end leaves it, and a finished one is not left', async t => {
  const { stream, calls } = streamOf()
  t.same(calls, [])
  const first = stream.next()
  stream.push(event(1))
  await first
  await stream.return()
  t.same(calls, ['begin', 'leave'])
  t.same(await stream.next(), { done: true, value: undefined })
  const whole = streamOf()
  const read = whole.stream.next()
  whole.stream.push(event(1, true))
  t.equal((await read).done, false)
  t.equal((await whole.stream.next()).done, true)
  await whole.stream.return()
  t.same(whole.calls, ['begin'])
})

t.test('a reader that leaves while it waits is woken, and a second reader at a time is an error', async t => {
  const { stream, calls } = streamOf()
  const waiting = stream.next()
  await t.rejects(stream.next(), { message: /one reader at a time/ })
  await stream.return()
  t.same(await waiting, { done: true, value: undefined })
  t.same(calls, ['begin', 'leave'])
})
