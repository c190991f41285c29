import t from 'tap'
import type { Grammar } from '../../src/contract/grammar.ts'
import type { GenerateRequest } from '../../src/contract/rollout-engine.ts'
import { EOS, grammarsOf, PIECES, vocabularyOf } from '../grammars/helpers/grammar-walk.ts'
import { Harness, makeRequest } from '../helpers/scheduler-harness.ts'
import type { HarnessOptions } from '../helpers/scheduler-harness.ts'

const vocabulary = vocabularyOf(PIECES)
const BYTE = 2
const SCHEMA: Grammar = {
  kind: 'json_schema',
  compact: true,
  schema: JSON.stringify({
    type: 'object',
    properties: { abc: { type: 'integer', minimum: 0, maximum: 99 }, b: { enum: ['é', '中'] } },
    required: ['abc', 'b']
  })
}

function harness (options: HarnessOptions = {}): Harness {
  return new Harness({
    vocabSize: vocabulary.size,
    eosTokenIds: [EOS],
    grammars: grammarsOf(vocabulary, options.eosTokenIds ?? [EOS]),
    ...options
  })
}

function textOf (ids: number[]): string {
  return Buffer
    .concat(
      ids.filter(id => id !== EOS).map(id =>
        Buffer.from(vocabulary.bytes.subarray(vocabulary.offsets[id], vocabulary.offsets[id + 1]))
      )
    )
    .toString()
}

function constrained (
  seed: bigint,
  grammar: Grammar = SCHEMA,
  sampling: Partial<GenerateRequest['sampling']> = {}
): GenerateRequest {
  return { ...makeRequest([5, 6, 7, 8, 9], { seed, maxNewTokens: 70, ...sampling }, {}), grammar }
}

t.test('constrained requests follow their grammar; free ones of the same batch are as without them', async t => {
  const alone = harness()
  const free = Array.from({ length: 4 }, (_, i) => makeRequest([11, i, 3], { seed: BigInt(i), maxNewTokens: 30 }))
  const expected = free.map(request => alone.add(request))
  alone.drain()
  // Few pages, and a pause: running requests are retracted and computed again.
  const h = harness({ pages: 20, maxRunningRequests: 8 })
  const mixed = free.flatMap((request, i) => [h.add(request), h.add(constrained(BigInt(i)))])
  for (let i = 0; i < 9; i++) h.scheduler.step()
  h.scheduler.pause('retract')
  h.scheduler.resume()
  h.drain()
  let retractions = 0
  for (const [i, id] of mixed.entries()) {
    const { events } = h.outcomes.get(id)!
    retractions += events.at(-1)!.retractions
    if (i % 2 === 0) {
      t.same(h.tokens(id), alone.tokens(expected[i / 2]!))
      h.verify(id)
      continue
    }
    t.same(events.at(-1)!.finish, { type: 'stop', matched: EOS })
    const value = JSON.parse(textOf(h.tokens(id))) as { abc: number, b: string }
    t.ok(value.abc >= 0 && value.abc <= 99 && ['é', '中'].includes(value.b))
  }
  t.ok(retractions > 0, 'some were retracted')
  const again = harness()
  const same = again.add(constrained(2n))
  again.drain()
  t.same(again.tokens(same), h.tokens(mixed[5]!), 'the seed and the grammar decide, not the batch')
})

t.test('a grammar survives an update and a pause with retract', async t => {
  const h = harness()
  const id = h.add(constrained(3n))
  for (let i = 0; i < 4; i++) h.scheduler.step()
  const before = h.tokens(id).length
  h.scheduler.pause('retract')
  h.scheduler.shut(1, false)
  h.openWith(5)
  h.scheduler.resume()
  h.drain()
  t.ok(before > 0 && h.outcomes.get(id)!.events.at(-1)!.weightVersion === '5')
  t.ok(JSON.parse(textOf(h.tokens(id))))
})

t.test('the end is allowed only where the text is whole, whatever min_tokens and ignore_eos say', async t => {
  const h = harness()
  const grammar: Grammar = { kind: 'choice', choices: ['ab', 'abc'] }
  const long = h.add(constrained(1n, grammar, { minNewTokens: 40 }))
  const ignoring = h.add(constrained(2n, grammar, { ignoreEos: true }))
  const plain = h.add(constrained(3n, grammar))
  h.drain()
  for (const id of [long, ignoring, plain]) {
    t.match(textOf(h.tokens(id)), /^abc?$/)
    t.equal(h.outcomes.get(id)!.events.at(-1)!.finish!.type, 'stop')
  }
  t.equal(textOf(h.tokens(long)), 'abc', 'the minimum bans the end while the text may go on')
  const without = harness({ eosTokenIds: [] })
  const last = without.add(constrained(1n, { kind: 'regex', pattern: 'ab' }))
  without.drain()
  t.same(without.outcomes.get(last)!.events.at(-1)!.finish, { type: 'stop', matched: null }, 'a model without eos')
  t.equal(textOf(without.tokens(last)), 'ab')
})

t.test('a stop token, a length and an abort end a constrained request as any other', async t => {
  const h = harness()
  const stopped = h.add(constrained(1n, { kind: 'regex', pattern: 'a{50}' }, { stopTokenIds: [BYTE + 97] }))
  const short = h.add(constrained(1n, { kind: 'regex', pattern: 'x{50}' }, { maxNewTokens: 3 }))
  const aborted = h.add(constrained(1n, { kind: 'regex', pattern: 'y{500}' }))
  for (let i = 0; i < 5; i++) h.scheduler.step()
  h.scheduler.abort(aborted)
  h.drain()
  t.same(h.outcomes.get(stopped)!.events.at(-1)!.finish, { type: 'stop', matched: BYTE + 97 })
  t.same(textOf(h.tokens(short)), 'xxx')
  t.same(h.outcomes.get(aborted)!.events.at(-1)!.finish!.type, 'abort')
})

t.test('only allowed tokens are sampled, and bad words never', async t => {
  const h = harness()
  const allowedTokenIds = [40, 41, 42, 287]
  const few = h.add(makeRequest([5, 6], { maxNewTokens: 60, allowedTokenIds }))
  const both = h.add(
    constrained(4n, { kind: 'regex', pattern: '[a-z]{30}' }, { allowedTokenIds: [BYTE + 97, BYTE + 98, EOS] })
  )
  h.drain()
  t.same(new Set(h.tokens(few)), new Set(allowedTokenIds))
  t.match(textOf(h.tokens(both)), /^[ab]{30}$/)
  const bad = harness({ vocabSize: 6, eosTokenIds: [], grammars: undefined as never })
  const badWords = [[3], [1, 2], [2, 4, 4]]
  const id = bad.add(makeRequest([1, 2, 3], { maxNewTokens: 200, badWords }))
  bad.drain()
  const text = bad.tokens(id).join('')
  t.equal(text.length, 200)
  t.notMatch(text, /3|12|244/)
  t.match(text, /1.*2/)
  t.ok(text.includes('44') && text.includes('24'), 'tokens of a bad word are free where it is not complete')
})

t.test('bad grammars and lists fail the request alone', async t => {
  const h = harness()
  const fine = h.add(constrained(1n))
  const refused = (request: GenerateRequest, code: string, message: RegExp): void => {
    const id = h.add(request)
    h.drain()
    t.match(h.outcomes.get(id)!.error, { code, message })
  }
  refused(constrained(1n, { kind: 'regex', pattern: '(' }), 'INVALID_REQUEST', /regex:/)
  refused(constrained(1n, { kind: 'json_schema', schema: '{"not":{}}' }), 'INVALID_REQUEST', /has not/)
  refused(makeRequest([5], { allowedTokenIds: [1, 9999] }), 'INVALID_REQUEST', /allowed_token_ids\[1\] is 9999/)
  refused(makeRequest([5], { badWords: [[1], [-4]] }), 'INVALID_REQUEST', /bad_words\[0\] is -4/)
  // Nothing that is allowed continues "a".
  refused(
    constrained(1n, { kind: 'regex', pattern: 'ab' }, { allowedTokenIds: [BYTE + 97] }),
    'INVALID_REQUEST',
    /no token of the model continues the output after 1 tokens/
  )
  // The only allowed token is banned, so the device samples another one.
  refused(
    constrained(1n, { kind: 'regex', pattern: 'zz' }, { badWords: [[BYTE + 122]] }),
    'INTERNAL',
    /which the request's constraint does not allow/
  )
  t.ok(JSON.parse(textOf(h.tokens(fine))))
})

t.test('a grammar is refused by an engine without grammars', async t => {
  const h = new Harness()
  const id = h.add({ ...makeRequest([1, 2]), grammar: { kind: 'regex', pattern: 'a+' } })
  h.drain()
  t.match(h.outcomes.get(id)!.error, { code: 'UNSUPPORTED', message: /no grammars.*kind regex/ })
})

t.test('guesses follow grammars, allowed tokens and bad words', async t => {
  const grammars: readonly Grammar[] = [
    SCHEMA,
    { kind: 'regex', pattern: '(ab|c){2,30}' },
    { kind: 'choice', choices: ['ab', 'abc'] }
  ]
  const requests = (epoch: number): GenerateRequest[] =>
    Array.from({ length: 24 }, (_, i) => {
      const seed = BigInt(i < 12 ? i : 100 * epoch + i)
      const words = [[BYTE + 98], [BYTE + 97, BYTE + 98], [BYTE + 99, BYTE + 97, BYTE + 98]]
      if (i % 4 === 0) return makeRequest([5, 6], { seed, maxNewTokens: 60, ignoreEos: true, badWords: words }, {})
      if (i % 4 === 1) {
        const allowedTokenIds = [BYTE + 97, BYTE + 98, BYTE + 99]
        return makeRequest([7, 8], { seed, maxNewTokens: 60, allowedTokenIds, badWords: words.slice(1) }, {})
      }
      return constrained(seed, grammars[i % 3], { minNewTokens: i % 5 === 0 ? 20 : 0 })
    })
  const plain = harness()
  const guessing = harness({ drafts: 8 })
  for (let epoch = 0; epoch < 4; epoch++) {
    // The third epoch has other weights, whose outputs differ from guesses after a while.
    for (const h of [plain, guessing]) {
      h.scheduler.shut(epoch, false)
      h.openWith(epoch === 2 ? 7 : 1)
    }
    const list = requests(epoch)
    const ids = [plain, guessing].map(h => list.map(request => h.add(request)))
    while (guessing.scheduler.busy) {
      guessing.scheduler.step()
      guessing.scheduler.check()
    }
    plain.drain()
    for (const [i, id] of ids[1]!.entries()) {
      t.same(guessing.tokens(id), plain.tokens(ids[0]![i]!), `epoch ${epoch}, request ${i}`)
      const [ours, other] = [guessing.outcomes.get(id)!, plain.outcomes.get(ids[0]![i]!)!]
      t.same(ours.events.at(-1)!.finish, other.events.at(-1)!.finish)
      t.same(ours.events.map(({ logprobs }) => logprobs), other.events.map(({ logprobs }) => logprobs))
    }
  }
  const { steps, draftTokens, acceptedTokens } = guessing.scheduler.stats()
  t.ok(acceptedTokens > 200 && draftTokens > acceptedTokens, `${acceptedTokens} of ${draftTokens} guesses were right`)
  t.ok(steps < plain.scheduler.stats().steps, 'fewer steps')
})

t.test('a guess after which no token is allowed is not computed', async t => {
  const errors = [undefined, 8].map(drafts => {
    const h = harness(drafts === undefined ? {} : { drafts })
    // The list has no b.
    const stuck = (): number =>
      h.add(constrained(1n, { kind: 'regex', pattern: 'a{6}b' }, { allowedTokenIds: [BYTE + 97] }))
    const ids = [0, 1, 2].map(() => {
      const id = stuck()
      h.drain()
      return id
    })
    return ids.map(id => ({ error: h.outcomes.get(id)!.error, tokens: h.tokens(id) }))
  })
  t.same(errors[1], errors[0])
  t.match(errors[0]![2], { error: { code: 'INVALID_REQUEST' }, tokens: { length: 6 } })
})
