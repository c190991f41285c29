import t from 'tap'
import { compile } from '../../src/grammars/compile.ts'
import { CompiledGrammar } from '../../src/grammars/compiled-grammar.ts'
import { GrammarMatcher } from '../../src/grammars/grammar-matcher.ts'
import type { Beginning } from '../../src/grammars/grammar-matcher.ts'
import { TokenTrie } from '../../src/grammars/token-trie.ts'
import { allowed, EOS, vocabularyOf } from './helpers/grammar-walk.ts'

// How one request's grammar takes its tokens: where it begins, and where it ends.

const PIECES = ['</think>', '</think>12', 'nk>3', '12', '</thi']
const vocabulary = vocabularyOf(PIECES)
const [CLOSE, CLOSE_12, REST_3, TWELVE, OPEN_CLOSE] = PIECES.map((_, i) => 258 + i) as [
  number,
  number,
  number,
  number,
  number
]
const byte = (char: string): number => 2 + char.charCodeAt(0)

function matcherOf (pattern: string, begin: Beginning | null = null, eos = [EOS]): GrammarMatcher {
  const network = compile({ kind: 'regex', pattern })
  const trie = new TokenTrie(vocabulary, vocabulary.size)
  return new GrammarMatcher(new CompiledGrammar(network, pattern, trie, eos, () => {}), eos, begin)
}

t.test('a token that ends the text is accepted where the text is whole, and nowhere else', async t => {
  const matcher = matcherOf('\\d{2,3}')
  t.notOk(matcher.accept(EOS), 'nothing has come')
  for (const [char, canEnd] of [['1', false], ['2', true]] as const) {
    const next = matcherOf('\\d{2,3}')
    t.ok(next.accept(byte('5')))
    if (char === '2') t.ok(next.accept(byte(char)))
    t.equal(allowed(next, vocabulary.size).includes(EOS), canEnd)
    t.equal(next.accept(EOS), canEnd)
    t.equal(next.ended, canEnd)
  }
  const full = matcherOf('\\d{2,3}')
  t.ok(full.accept(TWELVE))
  t.notOk(full.mustEnd)
  t.ok(full.accept(byte('3')))
  t.ok(full.mustEnd)
  t.notOk(full.ended, 'the token that ends it has not come')
  t.notOk(full.accept(byte('4')))
  const without = matcherOf('\\d{2}', null, [])
  t.ok(without.accept(TWELVE))
  t.ok(without.ended, 'without such a token the text ends by itself')
})

t.test('a grammar begins behind a text, with what the same token has behind it', async t => {
  const begin = { text: Buffer.from('</think>') }
  const after = (...tokens: number[]): GrammarMatcher => {
    const matcher = matcherOf('12?3', begin)
    for (const token of tokens) t.ok(matcher.accept(token))
    return matcher
  }
  t.equal(after().mask(), null, 'all is allowed before')
  t.equal(after(byte('9'), OPEN_CLOSE).mask(), null)
  for (const tokens of [[CLOSE], [...'</think>'].map(byte), [OPEN_CLOSE, byte('n'), byte('k'), byte('>')]]) {
    const matcher = after(...tokens)
    t.same(allowed(matcher, vocabulary.size), [byte('1'), TWELVE], tokens.join())
    t.notOk(matcher.accept(byte('3')))
  }
  t.same(allowed(after(CLOSE_12), vocabulary.size), [byte('3')], 'two characters of the grammar have come')
  t.ok(after(CLOSE_12, byte('3')).mustEnd)
  // Text that cannot begin the grammar is left out: the grammar begins behind it.
  t.same(allowed(after(OPEN_CLOSE, REST_3), vocabulary.size), [byte('1'), TWELVE])
})

t.test('a grammar may begin at once, unless the first token opens what comes before it', async t => {
  const begin = { token: CLOSE, opening: [byte('<')] }
  const open = matcherOf('12', begin)
  t.same(allowed(open, vocabulary.size).sort((a, b) => a - b), [byte('1'), byte('<'), TWELVE])
  t.ok(open.accept(byte('<')))
  t.equal(open.mask(), null)
  t.ok(open.accept(CLOSE))
  t.same(allowed(open, vocabulary.size), [byte('1'), TWELVE])
  const direct = matcherOf('12', begin)
  t.ok(direct.accept(byte('1')))
  t.same(allowed(direct, vocabulary.size), [byte('2')])
  t.notOk(direct.accept(byte('<')), 'only the first token opens')
})
