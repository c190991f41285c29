import fc from 'fast-check'
import t from 'tap'
import { reader } from './helpers/grammar-walk.ts'

const PATTERNS = [
  'a*b',
  '(ab|ba)+c?',
  '[a-c]{2,4}',
  'a{3}',
  'a{2,}b',
  '[^ab]c',
  '(a|b(c|a))*',
  'a?b?c?',
  '\\d\\w\\s',
  '(?:a|)b',
  '[é-ü]+a',
  '.b',
  'a.{0,2}c',
  '((a{2}){2}|b)*',
  '\\u0061\\x62',
  '[\\w-]+\\.b',
  '(a*)*b',
  '😀|[😁-😃]a'
]

t.test('a grammar of a pattern accepts exactly the texts that the pattern matches', async t => {
  const characters = fc.constantFrom('a', 'b', 'c', 'é', ' ', '1', '-', '.', '\n', '😀', '😂')
  for (const pattern of PATTERNS) {
    const read = reader({ kind: 'regex', pattern })
    const expected = new RegExp(`^(?:${pattern})$`, 'u')
    let matched = 0
    fc.assert(
      fc.property(fc.array(characters, { maxLength: 6 }).map(list => list.join('')), text => {
        matched += expected.test(text) ? 1 : 0
        return (read(text) === 'whole') === expected.test(text)
      }),
      { numRuns: 400, seed: 5 }
    )
    t.ok(matched >= 0, pattern)
  }
})

t.test('anchors at the ends, lenient escapes and named groups of Python are read', async t => {
  t.equal(reader({ kind: 'regex', pattern: '^ab$' })('ab'), 'whole')
  t.equal(reader({ kind: 'regex', pattern: '^a|b$' })('b'), 'whole')
  t.equal(reader({ kind: 'regex', pattern: 'a\\-b\\@' })('a-b@'), 'whole')
  t.equal(reader({ kind: 'regex', pattern: '(?P<year>\\d{4})' })('2026'), 'whole')
  t.equal(reader({ kind: 'regex', pattern: '\\Aab\\Z' })('ab'), 'whole')
  t.equal(reader({ kind: 'regex', pattern: 'ab' })('a'), 'begun')
  t.equal(reader({ kind: 'regex', pattern: 'ab' })('b'), 'no')
})

t.test('what is not regular, or too large, is refused by name', async t => {
  const refused = (pattern: string, message: RegExp): void => {
    t.throws(() => reader({ kind: 'regex', pattern }), { code: 'INVALID_REQUEST', message })
  }
  refused('(?=a)b', /\(\?=a\) is not supported: look-around/)
  refused('(a)\\1', /the reference \\1 is not supported/)
  refused('a\\bb', /\\b is not supported/)
  refused('(a$)b', /\$ is supported only at the ends/)
  refused('\\p{L}', /Unicode property \\p\{L\}/)
  refused('(a', /Unterminated group.*in the pattern "\(a"/)
  refused('a{200000}', /repeats more than 100000 times/)
  refused('((a{1000}){1000}){1000}', /more than 65536 states/)
  refused('a'.repeat(20_000), /has 20000 characters; at most 16384/)
  refused(`${'('.repeat(9000)}a${')'.repeat(7000)}`, /regex/)
})
