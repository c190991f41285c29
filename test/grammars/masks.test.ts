import fc from 'fast-check'
import t from 'tap'
import type { Grammar, Language } from '../../src/contract/grammar.ts'
import { allowed, EOS, grammarsOf, PIECES, reader, SPECIAL, vocabularyOf, walk } from './helpers/grammar-walk.ts'

const LANGUAGES: Language[] = [
  { kind: 'json_object' },
  { kind: 'regex', pattern: '(é|中|[a-f])+(abc|ab)?\\d{1,3}' },
  { kind: 'ebnf', grammar: 'root ::= "foo" | "fo" tail\ntail ::= ([a-d] tail)? "12"' },
  { kind: 'choice', choices: ['abcd', 'abce', 'foo', 'é'] },
  {
    kind: 'json_schema',
    schema: JSON.stringify({
      type: 'object',
      properties: { abc: { enum: ['ab', 'abcd'] }, t: { type: 'boolean' } },
      required: ['t'],
      additionalProperties: { type: 'integer', minimum: 3, maximum: 129 }
    })
  }
]

t.test('a mask allows exactly the tokens whose text has a continuation', async t => {
  const vocabulary = vocabularyOf(PIECES)
  const texts = Array.from(
    { length: vocabulary.size },
    (_, id) => Buffer.from(vocabulary.bytes.subarray(vocabulary.offsets[id], vocabulary.offsets[id + 1]))
  )
  for (const language of LANGUAGES) {
    const grammars = grammarsOf(vocabulary)
    // Reads every text from its beginning, without trie or masks.
    const automaton = reader(language)
    let checked = 0
    fc.assert(
      fc.property(fc.nat(), seed => {
        walk(grammars, vocabulary, language, seed, (_, text, ids) => {
          if (checked++ > 400) return
          const expected = texts.flatMap((bytes, id) => {
            if (id === SPECIAL) return []
            if (id === EOS) return automaton(text) === 'whole' ? [id] : []
            return automaton(Buffer.concat([text, bytes])) === 'no' ? [] : [id]
          })
          if (ids.join() !== expected.join()) {
            throw new Error(`after ${text.toString()}: ${ids.join()}, not ${expected.join()}`)
          }
        })
      }),
      { numRuns: 20, seed: 3 }
    )
    t.ok(checked > 20, `${language.kind}: ${checked} masks`)
  }
})

t.test('special tokens are text only where the grammar contains them', async t => {
  const vocabulary = vocabularyOf([])
  const first = (grammar: Grammar): number[] => allowed(grammarsOf(vocabulary).matcher(grammar), vocabulary.size)
  t.notOk(first({ kind: 'regex', pattern: '.*' }).includes(SPECIAL))
  t.ok(first({ kind: 'ebnf', grammar: 'root ::= "<call>" [a-z]*' }).includes(SPECIAL))
  t.same(first({ kind: 'regex', pattern: 'a*' }), [EOS, 2 + 97], 'the end, and a')
})

t.test('a grammar begins behind a token or a text', async t => {
  const vocabulary = vocabularyOf(PIECES)
  const think = 258 + PIECES.indexOf('</think>')
  const grammars = grammarsOf(vocabulary)
  const byToken = grammars.matcher({ kind: 'choice', choices: ['ab'], after: think })
  t.equal(byToken.mask(), null)
  for (const id of [EOS, 2, 258, SPECIAL]) t.ok(byToken.accept(id))
  t.notOk(byToken.ended, 'an end before the grammar is free')
  byToken.accept(think)
  t.same(allowed(byToken, vocabulary.size), [2 + 97, 258 + PIECES.indexOf('ab')])
  const byText = grammars.matcher({ kind: 'choice', choices: ['ab'], after: '</think>' })
  for (const char of 'x</thin</think') t.ok(byText.accept(char.charCodeAt(0) + 2) && byText.mask() === null)
  byText.accept('>'.charCodeAt(0) + 2)
  t.ok(byText.accept(2 + 97) && !byText.accept(2 + 97))
  const overlong = grammars.matcher({ kind: 'choice', choices: ['ab'], after: '<' })
  t.ok(overlong.accept(258 + PIECES.indexOf('</think>')))
  t.same(allowed(overlong, vocabulary.size), [2 + 97, 258 + PIECES.indexOf('ab')], 'text that is none of the grammar')
  const inside = grammars.matcher({ kind: 'regex', pattern: '.*b', after: '</' })
  t.ok(inside.accept(258 + PIECES.indexOf('</think>')) && inside.accept(98 + 2) && inside.accept(EOS))
  t.ok(inside.ended, 'text behind the end of reasoning belongs to the grammar')
  t.throws(() => grammars.matcher({ kind: 'json_object', after: 9999 }), {
    message: /after is 9999; expected a token id/
  })
})

t.test('with an opening, the first token decides where a grammar begins', async t => {
  const vocabulary = vocabularyOf(PIECES)
  const think = 258 + PIECES.indexOf('</think>')
  const matcher = (opening: string) =>
    grammarsOf(vocabulary).matcher({ kind: 'choice', choices: ['ab'], after: 'x', opening })
  const first = [2 + 97, 258 + PIECES.indexOf('ab')]
  const [opened, plain, unknown] = [matcher('</think>'), matcher('</think>'), matcher('no token')]
  t.same(allowed(opened, vocabulary.size).sort(), [...first, think].sort())
  t.ok(opened.accept(think) && opened.mask() === null && opened.accept(2 + 99) && opened.accept(2 + 120))
  t.same(allowed(opened, vocabulary.size), first)
  t.notOk(opened.accept(think), 'an opening is only the first token')
  t.ok(plain.accept(2 + 97))
  t.same(allowed(plain, vocabulary.size), [2 + 98])
  t.same(allowed(unknown, vocabulary.size), first)
})

t.test('compiled grammars and their masks are kept within bounds', async t => {
  const vocabulary = vocabularyOf(PIECES)
  const grammars = grammarsOf(vocabulary)
  for (let i = 0; i < 100; i++) grammars.matcher({ kind: 'choice', choices: [`a${i}`, 'b'] })
  t.equal(grammars.size, 64)
  const [a, b] = [grammars.matcher({ kind: 'json_object' }), grammars.matcher({ kind: 'json_object' })]
  t.equal(a.mask(), b.mask(), 'two requests share a mask')
  t.same(allowed(a, vocabulary.size), [2 + 123, ...PIECES.flatMap((text, i) => text === '{"' ? [258 + i] : [])])
})

t.test('deep nesting and many configurations stay within memory', async t => {
  const read = reader({ kind: 'json_object' })
  t.equal(read(`{"a":${'['.repeat(400)}${']'.repeat(400)}}`), 'whole')
  t.equal(read(`{"a":${'['.repeat(2000)}`), 'no', 'deeper than the limit')
  // 2^n configurations if all were made: they are made only for the texts that come.
  const wide = reader({ kind: 'regex', pattern: '.*foo.{200}' })
  t.equal(wide(`xfoo${'y'.repeat(200)}`), 'whole')
  t.equal(wide(`xfoo${'y'.repeat(199)}`), 'begun')
})
