import t from 'tap'
import { OrderedObject, stringify } from '../../src/http/ordered-json.ts'

t.test('an ordered object is written in the order of its entries, at every place', t => {
  const first = new OrderedObject([['52', { 'a"': 1 }], ['7', null], ['é\n', [2]]])
  const second = new OrderedObject<number>([['1', 1], ['0', 0]])
  const text = stringify({ list: [null, first, second], nested: { second }, empty: new OrderedObject([]) })
  const pair = '{"1":1,"0":0}'
  t.equal(
    text,
    `{"list":[null,{"52":{"a\\"":1},"7":null,"é\\n":[2]},${pair}],"nested":{"second":${pair}},"empty":{}}`
  )
  t.same(
    JSON.parse(text),
    JSON.parse(JSON.stringify({
      list: [null, first, second],
      nested: { second },
      empty: new OrderedObject([])
    })),
    'JSON.stringify writes the same entries'
  )
  t.equal(stringify(first), '{"52":{"a\\"":1},"7":null,"é\\n":[2]}')
  t.end()
})

t.test('other values are written as JSON.stringify writes them, also after a failure', t => {
  t.throws(() => stringify([new OrderedObject([['1', 1n]])]), TypeError)
  for (const value of [undefined, null, 'text', { a: [1, undefined] }]) t.equal(stringify(value), JSON.stringify(value))
  t.equal(JSON.stringify(new OrderedObject([['b', 1]])), '{"b":1}')
  t.end()
})
