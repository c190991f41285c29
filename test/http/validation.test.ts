import Fastify from 'fastify'
import type { RouteOptions } from 'fastify'
import fc from 'fast-check'
import { Type } from 'typebox'
import type { TSchema } from 'typebox'
import t from 'tap'
import refit from '../../src/app/plugin.ts'
import { coerceLax } from '../../src/http/lax.ts'
import { bodyCheck, validatorCompiler } from '../../src/http/validation.ts'
import { FakeEngine } from '../helpers/fake-engine.ts'

const Lax = Type.Object({
  int: Type.Optional(Type.Integer({ minimum: 0, maximum: 9 })),
  num: Type.Optional(Type.Number()),
  bool: Type.Optional(Type.Boolean()),
  text: Type.Optional(Type.String({ minLength: 1 })),
  list: Type.Optional(Type.Array(Type.Integer())),
  maybe: Type.Optional(Type.Union([Type.Integer(), Type.Null()])),
  either: Type.Optional(Type.Union([Type.String(), Type.Integer()])),
  deep: Type.Optional(Type.Object({ int: Type.Integer() }))
})
const check = bodyCheck(Lax)

function message (body: unknown): string {
  const outcome = check(body)
  return 'error' in outcome ? outcome.error.message : 'good'
}

t.test('strings become the numbers and booleans that they spell, as with pydantic', async t => {
  const cases: [object, object][] = [
    [{ int: '7' }, { int: 7 }],
    [{ int: ' +7.0 ' }, { int: 7 }],
    [{ num: '-1.5e2' }, { num: -150 }],
    [{ bool: 'False' }, { bool: false }],
    [{ bool: 'on' }, { bool: true }],
    [{ bool: 1 }, { bool: true }],
    [{ list: ['1', 2, '3'] }, { list: [1, 2, 3] }],
    [{ maybe: '4' }, { maybe: 4 }],
    [{ maybe: null }, { maybe: null }],
    [{ either: '5' }, { either: '5' }],
    [{ deep: { int: '6' } }, { deep: { int: 6 } }]
  ]
  for (const [body, expected] of cases) t.same(check(body), { value: expected })
})

t.test('a value that fits one branch of a union is not converted', async t => {
  const Prompt = Type.Union([
    Type.String(),
    Type.Array(Type.String()),
    Type.Array(Type.Integer()),
    Type.Array(Type.Array(Type.Integer()))
  ])
  const Flags = Type.Union([Type.Boolean(), Type.Array(Type.Boolean())])
  const Ids = Type.Union([
    Type.Union([Type.Array(Type.Integer()), Type.Array(Type.Union([Type.Array(Type.Integer()), Type.Null()]))]),
    Type.Null()
  ])
  const Options = Type.Object({
    num: Type.Optional(Type.Number()),
    stop: Type.Optional(Type.Union([Type.String(), Type.Array(Type.String()), Type.Null()]))
  })
  const Both = bodyCheck(
    Type.Object({
      prompt: Type.Optional(Prompt),
      flags: Type.Optional(Flags),
      ids: Type.Optional(Ids),
      options: Type.Optional(Type.Union([Options, Type.Array(Options)]))
    })
  )
  const cases: [object, object?][] = [
    [{ prompt: ['1', '2'] }],
    [{ prompt: ['1', '2+2='] }],
    [{ prompt: ['7'] }],
    [{ prompt: [1, 2] }],
    [{ prompt: [[1], [2]] }],
    [{ prompt: [] }],
    [{ prompt: ['1', 2] }, { prompt: [1, 2] }],
    [{ prompt: [1, '2'] }, { prompt: [1, 2] }],
    [{ prompt: [['1'], [2]] }, { prompt: [[1], [2]] }],
    [{ flags: 'true' }, { flags: true }],
    [{ flags: ['true', 0] }, { flags: [true, false] }],
    [{ ids: ['1'] }, { ids: [1] }],
    [{ ids: [['1'], null] }, { ids: [[1], null] }],
    [{ options: { num: '5', stop: ['6'] } }, { options: { num: 5, stop: ['6'] } }],
    [{ options: [{ num: '5', stop: '6' }, { num: 7 }] }, { options: [{ num: 5, stop: '6' }, { num: 7 }] }]
  ]
  for (const [body, expected = body] of cases) {
    const before = structuredClone(body)
    t.same(Both(body), { value: expected }, JSON.stringify(before))
    t.same(body, before, "the caller's stays as it is")
  }
  t.match(Both({ prompt: ['1', null] }), { error: { message: /^prompt\[1\]: / } })
  t.match(Both({ options: { num: '5', stop: 6 } }), { error: { message: /^options\.stop: / } })
})

t.test('values that pydantic does not convert are refused', async t => {
  t.equal(message({ int: '1.5' }), 'int: expected an integer, got "1.5"')
  t.equal(message({ int: '' }), 'int: expected an integer, got ""')
  t.equal(message({ int: 'Infinity' }), 'int: expected an integer, got "Infinity"')
  t.equal(message({ num: 'nan' }), 'num: expected a finite number, got "nan"')
  t.equal(message({ num: '1e999' }), 'num: expected a finite number, got Infinity')
  t.equal(message({ num: NaN }), 'num: expected a finite number, got NaN')
  t.equal(message({ bool: 2 }), 'bool: expected true or false, got 2')
  t.equal(message({ text: 3 }), 'text: expected a string, got 3')
  t.equal(message({ text: null }), 'text: expected a string, got null')
  t.equal(message({ text: '' }), 'text: must not be empty')
  t.equal(message({ int: '10' }), 'int: expected a number <= 9, got 10')
  t.equal(message({ maybe: [] }), 'maybe: expected an integer or null, got an empty array')
  t.equal(message({ deep: {} }), 'deep.int: is required')
  t.equal(message({ list: [1, 'x'.repeat(100)] }), `list[1]: expected an integer, got "${'x'.repeat(59)}…`)
  t.equal(message([]), 'body: expected an object, got an empty array')
})

t.test('a body whose schema forbids unknown fields is not converted', async t => {
  const strict = bodyCheck(Type.Object({ int: Type.Integer() }, { additionalProperties: false }))
  t.match(strict({ int: '1' }), { error: { message: 'int: expected an integer, got "1"' } })
  t.match(strict({ int: 1, imt: 2 }), { error: { message: 'imt: unknown field; known are int', param: 'imt' } })
})

t.test('the check ends for any value, and a value that passes fits the schema', async t => {
  fc.assert(
    fc.property(
      fc.record({
        int: fc.anything(),
        num: fc.anything(),
        bool: fc.anything(),
        text: fc.anything(),
        list: fc.anything(),
        maybe: fc.anything(),
        either: fc.anything(),
        deep: fc.anything()
      }, { requiredKeys: [] }),
      body => {
        const outcome = check(body)
        if ('error' in outcome) {
          return /^[a-z]+[^ ]*: ./.test(outcome.error.message) &&
            outcome.error.message.length < 500
        }
        const value = outcome.value as Record<string, unknown>
        return (value['int'] === undefined || Number.isInteger(value['int'])) &&
          (value['num'] === undefined || Number.isFinite(value['num'])) &&
          (value['bool'] === undefined || typeof value['bool'] === 'boolean') &&
          (value['text'] === undefined || typeof value['text'] === 'string')
      }
    ),
    { numRuns: 500 }
  )
})

t.test('numbers are unchanged after conversion to a string and back', async t => {
  fc.assert(fc.property(fc.maxSafeInteger(), fc.double({ noNaN: true, noDefaultInfinity: true }), (int, num) => {
    const schema = { type: 'object', properties: { int: { type: 'integer' }, num: { type: 'number' } } }
    const got = coerceLax(schema, { int: String(int), num: String(num) }) as { int: unknown, num: unknown }
    return (Math.abs(int) < 1e15 ? got.int === int : true) && Object.is(got.num, num === 0 ? Number(String(num)) : num)
  }))
})

t.test('the schemas of all routes compile, which a server does at their first request', async t => {
  const routes: RouteOptions[] = []
  const app = Fastify()
  app.addHook('onRoute', route => {
    routes.push(route)
  })
  const engine = new FakeEngine()
  await app.register(refit, { engine, tokenizer: null })
  await app.ready()
  let compiled = 0
  for (const { schema = {}, method, url } of routes) {
    for (const httpPart of ['body', 'querystring', 'params'] as const) {
      const part = schema[httpPart]
      if (part === undefined) continue
      const check = validatorCompiler({ schema: part as TSchema, method: String(method), url, httpPart })
      t.doesNotThrow(() => check({}), `${String(method)} ${url} ${httpPart}`)
      compiled++
    }
  }
  t.ok(compiled > 50, `${compiled} schemas`)
  await app.close()
  await engine.close()
})
