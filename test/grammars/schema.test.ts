import { Ajv2020 } from 'ajv/dist/2020.js'
import fc from 'fast-check'
import t from 'tap'
import { grammarsOf, PIECES, reader, vocabularyOf, walk } from './helpers/grammar-walk.ts'

const vocabulary = vocabularyOf(PIECES)

const names = fc.constantFrom('a', 'ab', 'b', 'name', 'x"y', 'é')
const leaf = fc.oneof(
  fc.constant({ type: 'null' }),
  fc.constant({ type: 'boolean' }),
  fc.constant({ type: ['integer', 'null'] }),
  fc
    .record({ min: fc.integer({ min: -1500, max: 1500 }), span: fc.integer({ min: 0, max: 3000 }) })
    .map(({ min, span }) => ({ type: 'integer', minimum: min, maximum: min + span })),
  fc
    .record({ min: fc.integer({ min: -30, max: 30 }), span: fc.integer({ min: 2, max: 50 }) })
    .map(({ min, span }) => ({ type: 'number', exclusiveMinimum: min - 0.5, exclusiveMaximum: min + span })),
  fc.constant({ type: 'number' }),
  fc
    .record({ min: fc.nat(3), span: fc.nat(4) })
    .map(({ min, span }) => ({ type: 'string', minLength: min, maxLength: min + span })),
  fc.constantFrom('^[a-c]{1,3}$', 'b|"', '^\\d+x?$').map(pattern => ({ type: 'string', pattern })),
  fc.constant({ type: 'string', pattern: '^[^a]{0,3}$' }),
  fc.constant({ enum: ['a', 1, null, { k: [1, 'é'] }, '"\n'] }),
  fc.constant({ const: { a: [true] } })
)
const { schema } = fc.letrec(tie => ({
  schema: fc.oneof(
    { depthSize: 'small', maxDepth: 3 },
    leaf,
    tie('array'),
    tie('tuple'),
    tie('object'),
    tie('any'),
    tie('one')
  ),
  array: fc
    .record({ items: tie('schema'), min: fc.nat(2), span: fc.nat(2) })
    .map(({ items, min, span }) => ({ type: 'array', items, minItems: min, maxItems: min + span })),
  tuple: fc
    .record({ items: fc.array(tie('schema'), { minLength: 1, maxLength: 3 }), min: fc.nat(1) })
    .map(({ items, min }) => ({ type: 'array', prefixItems: items, minItems: min })),
  object: fc
    .record({
      properties: fc.dictionary(names, tie('schema'), { maxKeys: 4 }),
      required: fc.array(names, { maxLength: 2 }),
      more: fc.oneof(fc.constant(undefined), fc.constant(false), leaf)
    })
    .map(({ properties, required, more }) => ({
      type: 'object',
      properties,
      required: [...new Set(required)].filter(name => more !== false || Object.hasOwn(properties, name)),
      ...more === undefined ? {} : { additionalProperties: more }
    })),
  any: fc.array(tie('schema'), { minLength: 1, maxLength: 3 }).map(list => ({ anyOf: list })),
  one: fc.record({ a: tie('schema'), b: tie('schema') }).map(({ a, b }) => ({
    oneOf: [
      { type: 'object', properties: { kind: { const: 'a' }, v: a }, required: ['kind'] },
      { type: 'object', properties: { kind: { const: 'b' }, v: b }, required: ['kind', 'v'] }
    ]
  }))
}))

t.test('every text of a random schema is valid', async t => {
  const ajv = new Ajv2020({ strict: false })
  let ended = 0
  let steps = 0
  fc.assert(
    fc.property(schema, fc.nat(), fc.boolean(), (value, seed, compact) => {
      const source = JSON.stringify(value)
      const grammars = grammarsOf(vocabulary)
      const valid = ajv.compile(JSON.parse(source) as object)
      for (let i = 0; i < 3; i++) {
        const text = walk(
          grammars,
          vocabulary,
          { kind: 'json_schema', schema: source, compact },
          seed + i,
          () => steps++
        )
        if (text === null) continue
        ended++
        let parsed: unknown
        try {
          parsed = JSON.parse(text)
        } catch (error) {
          throw new Error(`${source}: ${text}: ${(error as Error).message}`)
        }
        if (!valid(parsed)) throw new Error(`${source}: ${text}: ${ajv.errorsText(valid.errors)}`)
      }
    }),
    { numRuns: 100, seed: 11 }
  )
  t.ok(ended > 200, `${ended} texts in ${steps} steps`)
})

t.test('a schema accepts the texts that people expect', async t => {
  const accepts = (schema: unknown, texts: string[], others: string[] = []): void => {
    const read = reader({ kind: 'json_schema', schema: JSON.stringify(schema) })
    for (const text of texts) t.equal(read(text), 'whole', text)
    for (const text of others) t.not(read(text), 'whole', text)
  }
  accepts({ type: 'object', properties: { a: { type: 'integer' }, b: { type: 'string' } }, required: ['b'] }, [
    '{"b":"x"}',
    '{"a": 1, "b": "\\u00e9\\n"}',
    '{\n  "a": 1,\n  "b": "x"\n}'
  ], ['{}', '{"a":1}', '{"b":"x","c":1}', '{"b":"x","a":1}', '{"b":"x",}'])
  accepts(
    {
      $ref: '#/$defs/tree',
      $defs: {
        tree: {
          type: 'object',
          properties: { kids: { type: 'array', items: { $ref: '#/$defs/tree' } } },
          required: ['kids']
        }
      }
    },
    ['{"kids":[]}', '{"kids":[{"kids":[{"kids":[]}]},{"kids":[]}]}'],
    ['{"kids":[1]}']
  )
  accepts(
    {
      allOf: [{ type: 'object', properties: { a: { type: 'integer' } }, required: ['a'] }, {
        properties: { b: { const: 2 } },
        required: ['b']
      }]
    },
    ['{"a":1,"b":2}'],
    ['{"a":1}', '{"b":2}']
  )
  accepts({ type: 'integer', minimum: -12, exclusiveMaximum: 105 }, ['-12', '-1', '0', '99', '104'], [
    '-13',
    '105',
    '01',
    '-0'
  ])
  accepts({ type: 'number', minimum: 0, maximum: 1 }, ['0', '1', '0.5', '0.125'], ['1.5', '-0.5', '2'])
  accepts({ type: 'object', properties: { ab: { type: 'null' } }, additionalProperties: { type: 'integer' } }, [
    '{"ab":null,"a":1,"abc":2}',
    '{"x":3}'
  ], ['{"ab":1}', '{"x":null}', '{"a":1,"ab":null}'])
  accepts({ type: 'string', format: 'date' }, ['"2026-02-28"'], ['"2026-02-30"', '"2026-13-01"'])
  accepts({}, ['1', '{"a":[1,{"b":null}]}', '"x"'], ['', 'x'])
  t.equal(reader({ kind: 'json_object' })('{"a": [1, 2.5e3]}'), 'whole')
  t.equal(reader({ kind: 'json_object' })('[]'), 'no')
  t.equal(reader({ kind: 'choice', choices: ['yes', 'no', 'nope'] })('nope'), 'whole')
})

t.test('what no grammar follows is refused by name, with its place', async t => {
  const refused = (schema: unknown, message: RegExp): void => {
    t.throws(
      () => reader({ kind: 'json_schema', schema: typeof schema === 'string' ? schema : JSON.stringify(schema) }),
      {
        code: 'INVALID_REQUEST',
        message
      }
    )
  }
  refused('{', /not JSON/)
  refused({ type: 'object', properties: { a: { not: {} } } }, /\/properties\/a has not, which is not supported/)
  refused({ type: 'array', uniqueItems: true }, /uniqueItems/)
  refused({ type: 'integer', multipleOf: 3 }, /multipleOf/)
  refused({ type: 'text' }, /has the type "text"; expected null, boolean/)
  refused({ oneOf: [{ type: 'integer' }, { type: 'number' }] }, /oneOf with schemas that may accept the same value/)
  refused({ $ref: 'http://x' }, /places in the same schema/)
  refused({ $ref: '#/$defs/x' }, /does not contain/)
  refused({ $ref: '#' }, /begins with itself|without end|no finite/)
  refused({ type: 'object', properties: { a: { $ref: '#' } }, required: ['a'] }, /no finite text/)
  refused({ type: 'string', format: 'iri' }, /format "iri"; supported are date/)
  refused({ type: 'string', pattern: 'a', maxLength: 3 }, /combines pattern/)
  refused({ type: 'number', minimum: 0.2, maximum: 0.8 }, /without an integer between/)
  refused({ allOf: [{ type: 'string' }, { type: 'null' }] }, /combines the types/)
  refused(false, /accepts nothing/)
  refused({ type: 'string', maxLength: 1_000_000 }, /states/)
  let deep: object = { type: 'null' }
  for (let i = 0; i < 100; i++) deep = { type: 'array', items: deep }
  refused(deep, /nested deeper than 64/)
  refused({ description: 'x'.repeat(300_000) }, /at most 262144/)
})
