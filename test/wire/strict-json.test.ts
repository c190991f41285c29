import fc from 'fast-check'
import t from 'tap'
import { JsonSyntaxError, StrictJson } from '../../src/wire/strict-json.ts'

const of = (text: string | Buffer): StrictJson => new StrictJson(Buffer.from(text as string))

/** The reason for which the parser refuses a text, or undefined. */
function refusal (text: string): string | undefined {
  const reader = of(text)
  try {
    reader.skip()
    reader.end(0x20)
  } catch (error) {
    if (!(error instanceof JsonSyntaxError)) throw error
    return error.message
  }
}

const accepts = (text: string): boolean => refusal(text) === undefined

t.test('the parser accepts and refuses the same texts as JSON.parse', async t => {
  const damage = fc.constantFrom('', '"', '{', ',', '}', ']', '\\', '0', '-', '.', 'e', '\n', '\t', ' ', '\x01')
  const damaged = fc.json().chain(text =>
    fc.tuple(fc.nat(text.length), damage).map(([at, c]) => text.slice(0, at) + c + text.slice(at + 1))
  )
  fc.assert(
    fc.property(fc.oneof(fc.json(), damaged), text => {
      const why = refusal(text.trimEnd())
      try {
        JSON.parse(text)
      } catch {
        return why !== undefined
      }
      return why === undefined || /comes twice|half a surrogate/.test(why)
    }),
    { numRuns: 5000 }
  )
})

t.test('strings are read as JSON.parse reads them', async t => {
  fc.assert(fc.property(fc.string({ unit: 'grapheme' }), text => of(JSON.stringify(text)).string() === text))
  fc.assert(fc.property(fc.string({ unit: 'binary-ascii' }), text => of(JSON.stringify(text)).string() === text))
  t.equal(of('"\\u0041\\/\\b\\ud83d\\ude00"').string(), 'A/\b\u{1f600}')
})

const badStrings: Array<[string, string | Buffer]> = [
  ['an end inside', '"abc'],
  ['an end after a backslash', '"abc\\'],
  ['an unknown escape', '"\\x41"'],
  ['short hex', '"\\u12"'],
  ['half a surrogate pair', '"\\ud83d"'],
  ['a raw newline', '"a\nb"'],
  ['an escaped raw newline', '"a\\\nb"'],
  ['single quotes', "'a'"],
  ['broken UTF-8', Buffer.from([0x22, 0xc3, 0x28, 0x22])],
  ['an overlong slash', Buffer.from([0x22, 0xc0, 0xaf, 0x22])],
  ['a surrogate in UTF-8', Buffer.from([0x22, 0xed, 0xa0, 0x80, 0x22])],
  ['a byte order mark', '\ufeff"a"']
]
for (const [what, text] of badStrings) {
  t.test(`a string with ${what} is refused`, async t => {
    t.throws(() => of(text).string(), { name: 'JsonSyntaxError' })
  })
}

t.test('unsigned integers are exact up to 2^53 - 1, and other numbers are refused', async t => {
  fc.assert(fc.property(fc.maxSafeNat(), n => of(`${n},`).uint() === n))
  t.equal(of('9007199254740991').uint(), Number.MAX_SAFE_INTEGER)
  for (
    const text of [
      '9007199254740992',
      '18446744073709551616',
      '9'.repeat(400),
      '-1',
      '1.0',
      '1e3',
      '1E3',
      '01',
      '00',
      '',
      '+1',
      '"1"',
      'null',
      '٣'
    ]
  ) {
    t.throws(() => of(text).uint(), { name: 'JsonSyntaxError' }, text)
  }
})

t.test('lists of integers have a limit', async t => {
  t.same(of('[ 1 ,2,\n3 ]').uints(3), [1, 2, 3])
  t.same(of('[]').uints(0), [])
  for (const text of ['[1,2,3,4]', '[1,]', '[,]', '[1 2]', '[', '[1', '{}', '[[1]]']) {
    t.throws(() => of(text).uints(3), { name: 'JsonSyntaxError' }, text)
  }
})

t.test('a duplicate key is refused, also when it is written with an escape', async t => {
  for (const text of ['{"a":1,"a":1}', '{"a":1,"\\u0061":1}', '{"x":{"b":1,"b":2}}', '{"":1,"":1}']) {
    t.notOk(accepts(text), text)
  }
  t.throws(() => of('{"a":1,"a":2}').skip(), { message: /the key "a" comes twice at byte 7/ })
  t.ok(accepts('{"a":{"a":1},"b":{"a":1},"__proto__":1}'))
})

t.test('the depth of nesting is limited, and no text overflows the stack', async t => {
  t.ok(accepts('['.repeat(60) + ']'.repeat(60)))
  for (const open of ['[', '{"a":']) {
    t.throws(() => of(open.repeat(1_000_000)).skip(), { message: /nested deeper than 64/ })
  }
})

t.test('only padding may follow the value', async t => {
  const after = (text: string): void => {
    const reader = of(text)
    reader.skip()
    reader.end(0x20)
  }
  t.doesNotThrow(() => {
    after('{}    ')
  })
  for (const text of ['{}\n', '{} {}', '{}\0', '{},', '{}  x']) {
    t.throws(
      () => {
        after(text)
      },
      /expected the end/,
      JSON.stringify(text)
    )
  }
})
