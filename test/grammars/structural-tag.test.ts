import t from 'tap'
import { reader } from './helpers/grammar-walk.ts'

const read = (tag: unknown): ReturnType<typeof reader> => reader({ kind: 'structural_tag', tag: JSON.stringify(tag) })
const json = (schema: object): object => ({ type: 'json_schema', json_schema: schema })
const CALL = { type: 'object', properties: { a: { type: 'integer' } }, required: ['a'] }

t.test('the older form: free text, in which a trigger begins a tag', async t => {
  const accepts = read({
    structures: [
      { begin: '<function=get>', schema: CALL, end: '</function>' },
      { begin: '<function=set>', schema: { type: 'null' }, end: '</function>' }
    ],
    triggers: ['<function=']
  })
  for (
    const text of [
      '',
      'any text < and <func',
      'x<function=get>{"a":1}</function>',
      '<function=set>null</function> then <function=get>{"a": 2}</function>.'
    ]
  ) t.equal(accepts(text), 'whole', text)
  t.equal(accepts('<function=get>{"a":1}'), 'begun')
  for (const text of ['<function=put>', '<function=get>{"b":1}', 'xx<function=set>1']) {
    t.equal(accepts(text), 'no', text)
  }
})

t.test('formats are combined', async t => {
  const tag = (begin: string, content: object, end: string | string[]): object => ({ type: 'tag', begin, content, end })
  const accepts = read({
    type: 'structural_tag',
    format: {
      type: 'sequence',
      elements: [
        tag('<think>', { type: 'any_text' }, '</think>'),
        {
          type: 'or',
          elements: [{ type: 'const_string', value: 'none' }, {
            type: 'tags_with_separator',
            tags: [tag('[', json({ type: 'boolean' }), ']'), tag('(', { type: 'regex', pattern: '\\d+' }, [')', '>'])],
            separator: ', ',
            at_least_one: true
          }]
        },
        { type: 'grammar', grammar: 'root ::= end\nend ::= "." | "!" end' }
      ]
    }
  })
  for (const text of ['<think>a </thin b</think>none.', '<think></think>[true], (12>, (3)!!.']) {
    t.equal(accepts(text), 'whole', text)
  }
  for (const text of ['<think></think>', '<think></think>[true]', '<think>[true].']) {
    t.equal(accepts(text), 'begun', text)
  }
  for (const text of ['x', '<think></think>[1', '<think></think>none?']) t.equal(accepts(text), 'no', text)
})

t.test('at_least_one, stop_after_first and excluded texts', async t => {
  const format = {
    type: 'triggered_tags',
    triggers: ['<a'],
    tags: [{ type: 'tag', begin: '<ab>', content: { type: 'any_text', excludes: ['bad'] }, end: '</a>' }]
  }
  const must = read({ format: { ...format, at_least_one: true } })
  t.equal(must('text'), 'no')
  t.equal(must('<ab>x</a> more <ab></a>'), 'whole')
  const once = read({ format: { ...format, stop_after_first: true } })
  t.equal(once('text <ab>x</a>'), 'whole')
  t.equal(once('text <ab>x</a>y'), 'no')
  t.equal(once('<ab>ba</a>'), 'whole')
  t.equal(once('<ab>bad'), 'no')
})

t.test('what is wrong is refused by name', async t => {
  const refused = (tag: unknown, message: RegExp): void => {
    t.throws(() => read(tag), { code: 'INVALID_REQUEST', message })
  }
  refused({}, /format is "absent"; expected an object/)
  refused({ format: { type: 'xml' } }, /the format "xml" is not supported; supported are const_string/)
  refused({ structures: [{ begin: '<f>', schema: {}, end: '' }], triggers: ['<g'] }, /no trigger is the beginning/)
  refused({ structures: [{ begin: '<f>', schema: { not: {} }, end: '' }], triggers: ['<f'] }, /has not/)
  refused({ format: { type: 'sequence', elements: [] } }, /expected a list that is not empty/)
  refused(
    { format: { type: 'tag', begin: 1, content: { type: 'any_text' }, end: '' } },
    /tag.begin is "1"; expected a text/
  )
})
