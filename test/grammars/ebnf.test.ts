import t from 'tap'
import { reader } from './helpers/grammar-walk.ts'

const ARITHMETIC = `
# Sums in brackets
root  ::= sum
sum   ::= part ("+" part)*
part  ::= [0-9]{1,3} | "(" sum ")"   # a comment
`

t.test('rules, groups, classes and repetitions are read', async t => {
  const read = reader({ kind: 'ebnf', grammar: ARITHMETIC })
  for (const text of ['1', '12+345', '((1+2)+3)', '(((((((7)))))))']) t.equal(read(text), 'whole', text)
  for (const text of ['', '1+', '(1']) t.equal(read(text), 'begun', text)
  for (const text of ['1234', '+1', '()', '1)']) t.equal(read(text), 'no', text)
  const other = reader({ kind: 'ebnf', grammar: 'root ::= "\\x41" [^a-z\\n] . ("\\u00e9" | \'q\'){2,} [\\]-]?' })
  for (const text of ['AB\nqé', 'A1xqqq]', 'A 😀éq-']) t.equal(other(text), 'whole', text)
  for (const text of ['Ab', 'B']) t.equal(other(text), 'no', text)
})

t.test('a list that calls itself at its end may be long', async t => {
  const read = reader({ kind: 'ebnf', grammar: 'root ::= "a" root | "b"' })
  t.equal(read('a'.repeat(20_000) + 'b'), 'whole')
})

t.test('mistakes are reported with their line', async t => {
  const refused = (grammar: string, message: RegExp): void => {
    t.throws(() => reader({ kind: 'ebnf', grammar }), { code: 'INVALID_REQUEST', message })
  }
  refused('root ::= "a"\nb ::= c', /line 2: the rule c is not defined/)
  refused('a ::= "x"', /no rule root/)
  refused('root ::= "a', /the text has no end/)
  refused('root ::= ("a"', /expected \)/)
  refused('root ::= "a"{3,1}', /no number of repetitions/)
  refused('root ::= "a"\nroot ::= "b"', /line 2: the rule root is defined twice/)
  refused('root ::= "a" (= "b")', /look-ahead/)
  refused('start: "a"', /expected a rule: name ::= body/)
  refused('root ::= root "a" | "b"', /the rule root begins with itself/)
  refused('root ::= x root | "b"\nx ::= "a"?', /begins with itself/)
  refused('root ::= "a" root', /no finite text/)
  refused(`root ::= ${'('.repeat(200)}"a"${')'.repeat(200)}`, /nested deeper than 100/)
  refused('root ::= "a"{90000}{2}', /states/)
})
