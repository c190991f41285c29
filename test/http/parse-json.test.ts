import t from 'tap'
import fc from 'fast-check'
import { parseJsonText } from '../../src/http/parse-json.ts'

const long = (unit: string): fc.Arbitrary<string> =>
  fc.integer({ min: 0, max: 40_000 }).map(length => unit.repeat(Math.ceil(length / unit.length)))
const texts = fc.oneof(
  fc.string(),
  long('QUJD/+4='),
  long('a"b'),
  long('\\'),
  long('\\"'),
  long('ä'),
  long('~0~1'),
  long(': ')
)

t.test('any body is read as JSON.parse reads it', async t => {
  const values = fc
    .letrec(tie => ({
      value: fc.oneof(
        { depthSize: 'small' },
        texts,
        fc.integer(),
        fc.boolean(),
        fc.constant(null),
        fc.array(tie('value'), { maxLength: 3 }),
        fc.dictionary(texts.filter(key => key !== '__proto__'), tie('value'), { maxKeys: 3 })
      )
    }))
    .value
  fc.assert(
    fc.property(values, fc.nat(2), (value, indent) => {
      const text = JSON.stringify(value, null, indent)
      t.same(parseJsonText(text), JSON.parse(text))
    }),
    { numRuns: 300 }
  )
})

t.test('a string that ends with backslashes ends there, whatever follows it', async t => {
  // Without quotes for a while: a reader that is out of step takes this for a string.
  const numbers = Array.from({ length: 20_000 }, (_, i) => i)
  for (const slashes of [1, 2, 3]) {
    const end = '\\'.repeat(slashes)
    for (
      const value of [[end, numbers, 'x'], [end, 'y', numbers, 'x'], ['x'.repeat(20_000) + end, numbers, end], {
        [end]: [numbers, end + '"']
      }]
    ) {
      t.same(parseJsonText(JSON.stringify(value)), value)
    }
  }
})

t.test('invalid JSON is refused, also with a long string in it', async t => {
  const text = 'x'.repeat(100_000)
  for (
    const body of [
      `{"a":"${text}`,
      `{"a":"${text}"`,
      `["${text}" "${text}"]`,
      `["${text}",]`,
      `{"${text}"}`,
      `"${text}\\"`,
      `'${text}'`,
      `["${text}\\x"]`
    ]
  ) t.throws(() => parseJsonText(body), SyntaxError, body.slice(0, 10))
})

t.test('long strings may be values or keys, and may contain the placeholders of the parser', async t => {
  const text = 'QUJD'.repeat(10_000)
  for (const value of [text, [text, text, '~0~0'], { [text]: text }, { a: [[{ b: text }]], '~1~': text }, `${text}"`]) {
    t.same(parseJsonText(JSON.stringify(value)), value)
  }
  t.same(parseJsonText(`{ "${text}" \n : "${text}" }`), { [text]: text })
})

t.test('a long key with much white space behind it stays a key', async t => {
  const key = 'k'.repeat(20_000)
  t.same(parseJsonText(`{"${key}"${' '.repeat(100)}: 1}`), { [key]: 1 })
})

t.test('no body makes the parser search its text many times', async t => {
  const { includes } = String.prototype
  let searches = 0
  const replace = (method: unknown): boolean => Reflect.set(String.prototype, 'includes', method)
  replace(function (this: string, ...args: Parameters<typeof includes>) {
    searches++
    return includes.apply(this, args)
  })
  t.teardown(() => {
    replace(includes)
  })
  const text = Array.from({ length: 5000 }, (_, i) => `~${i}~`).join('')
  t.same(parseJsonText(JSON.stringify([text])), [text])
  t.ok(searches < 10, `${searches} searches`)
})
