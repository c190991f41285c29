import t from 'tap'
import type { Grammar } from '../../src/contract/grammar.ts'
import { generateBody } from '../../src/remote/wire.ts'
import { makeRequest } from '../helpers/scheduler-harness.ts'

t.test("a grammar goes to a remote engine in SGLang's fields", async t => {
  const cases: [Grammar, object][] = [
    [{ kind: 'json_object' }, { json_schema: '{"type":"object"}' }],
    [{ kind: 'json_schema', schema: '{}' }, { json_schema: '{}' }],
    [{ kind: 'regex', pattern: 'a+' }, { regex: 'a+' }],
    [{ kind: 'ebnf', grammar: 'root ::= "a"' }, { ebnf: 'root ::= "a"' }],
    [{ kind: 'choice', choices: ['a"', 'b'] }, { ebnf: 'root ::= "a\\"" | "b"' }],
    [{ kind: 'structural_tag', tag: '{}' }, { structural_tag: '{}' }]
  ]
  for (const [grammar, fields] of cases) {
    t.match(generateBody({ ...makeRequest([1]), grammar }, true), { sampling_params: fields }, grammar.kind)
  }
})

t.test("what SGLang's /generate cannot say is refused", async t => {
  t.throws(() => generateBody({ ...makeRequest([1]), grammar: { kind: 'json_object', after: 5 } }, true), {
    code: 'UNSUPPORTED'
  })
  t.throws(() => generateBody(makeRequest([1], { allowedTokenIds: [1] }), true), { code: 'UNSUPPORTED' })
  t.throws(() => generateBody(makeRequest([1], { badWords: [[1]] }), true), { code: 'UNSUPPORTED' })
})
