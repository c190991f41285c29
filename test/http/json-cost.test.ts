import fc from 'fast-check'
import t from 'tap'
import { checkJsonCost, mostPoints } from '../../src/http/json-cost.ts'
import { LONG } from '../../src/http/parse-json.ts'
import { gatewayTo } from '../helpers/gateway.ts'
import { call, routeApp } from '../helpers/route-app.ts'

/** Memory that a point stands for, so that `checkJsonCost` returns the points. */
const BYTES = 12
const list = (count: number, item: (i: number) => string): string =>
  `[${Array.from({ length: count }, (_, i) => item(i))}]`
const repeat = (count: number, item: string): string => list(count, () => item)
const json = { method: 'POST', headers: { 'content-type': 'application/json' } }

/** Points of a value by what JSON.parse makes of it. */
function pointsOf (text: string): number {
  let points = Buffer.byteLength(text) / 64
  const classes = new Set<string>()
  const string = (value: string): void => {
    const written = JSON.stringify(value)
    const bytes = Buffer.byteLength(written) - 1
    if (written.includes('\\')) points += bytes / 16
    else if (bytes > LONG) points -= bytes / 64
  }
  const open: unknown[] = [JSON.parse(text)]
  while (open.length > 0) {
    const value = open.pop()
    if (typeof value === 'string') {
      points += 8
      string(value)
    }
    if (typeof value !== 'object' || value === null) continue
    const inner = Object.values(value)
    points += 6 + Math.max(0, inner.length - 1)
    open.push(...inner)
    const before: string[] = []
    for (const name of Array.isArray(value) ? [] : Object.keys(value)) {
      string(name)
      if (/^\d{1,9}$/.test(name)) {
        points += 6
        continue
      }
      before.push(name)
      const isNew = !classes.has(JSON.stringify(before)) || Buffer.byteLength(JSON.stringify(name)) - 2 > 4096
      points += isNew ? 30 : 1
      classes.add(JSON.stringify(before))
    }
  }
  return points
}

t.test('the values of any body are counted, and not what its strings look like', async t => {
  const long = (unit: string): fc.Arbitrary<string> =>
    fc.integer({ min: 0, max: 20_000 }).map(length => unit.repeat(Math.ceil(length / unit.length)))
  const texts = fc.oneof(fc.string(), long('{[,:'), long('a"b'), long('\\'), long(`${'a'.repeat(47)}"`), long('ä'))
  const values = fc
    .letrec(tie => ({
      value: fc.oneof(
        { depthSize: 'small' },
        texts,
        fc.double({ noNaN: true }),
        fc.constant(null),
        fc.array(tie('value'), { maxLength: 4 }),
        fc.dictionary(fc.oneof(texts, fc.constantFrom('a', 'b', 'c'), fc.nat().map(String)), tie('value'), {
          maxKeys: 4,
          noNullPrototype: true
        })
      )
    }))
    .value
  await fc.assert(
    fc.asyncProperty(values, fc.nat(2), async (value, indent) => {
      const text = JSON.stringify(value, null, indent)
      const { memory } = await checkJsonCost(Buffer.from(text), Infinity)
      t.equal(memory, Math.ceil(pointsOf(text) * BYTES))
    }),
    { numRuns: 150 }
  )
})

t.test('what trainers send is far below the limit', async t => {
  const name = (i: number): string => `model.layers.${i % 61}.mlp.experts.${i}.gate_proj.weight`
  const tensor = { shape: [2048, 7168], dtype: 'bfloat16', layout: 3 }
  const message = JSON.stringify({ role: 'assistant', content: 'Because the second term is even.'.repeat(5) })
  const parameters = JSON.stringify({ temperature: 1, top_p: 1, top_k: -1, max_new_tokens: 1024, n: 1, stop: [] })
  const columns = (count: number): string =>
    `{"names":${list(count, i => `"${name(i)}"`)},"dtypes":${repeat(count, '"bfloat16"')},` +
    `"shapes":${repeat(count, '[2048,7168]')}}`
  const rows = (count: number): string => list(count, i => JSON.stringify({ name: name(i), ...tensor }))
  const members = (count: number): string =>
    JSON.stringify(Object.fromEntries(Array.from({ length: count }, (_, i) => [name(i), [tensor.shape, tensor.dtype]])))
  const bodies: [string, 'normal' | 'admin', number, string][] = [
    ['18,867 tensors as lists', 'admin', 0.15, columns(18_867)],
    ['18,867 tensors as objects', 'admin', 0.2, rows(18_867)],
    ['18,867 tensors as fields', 'admin', 0.2, members(18_867)],
    ['100,000 tensors as lists', 'admin', 0.7, columns(100_000)],
    ['100,000 tensors as objects', 'admin', 0.95, rows(100_000)],
    ['100,000 tensors as fields', 'admin', 0.9, members(100_000)],
    ['handles', 'admin', 0.001, `{"serialized_named_tensors":${repeat(8, `"${'QUJD'.repeat(2 ** 18)}"`)}}`],
    ['8 MB of token ids', 'normal', 0.95, `{"input_ids":${repeat(4096, `[${Array(330).fill(151643)}]`)}}`],
    ['one prompt of a million ids', 'normal', 0.75, `{"input_ids":[${Array(2 ** 20).fill(151643)}]}`],
    ['10,000 messages', 'normal', 0.25, `{"messages":${repeat(10_000, message)}}`],
    ['a bias for each token', 'normal', 0.7, `{"logit_bias":{${list(151_936, i => `"${i}":-1`).slice(1, -1)}}}`],
    ['4096 prompts with parameters of their own', 'normal', 0.1, `{"sampling_params":${repeat(4096, parameters)}}`]
  ]
  for (const [what, auth, part, body] of bodies) {
    const most = mostPoints(auth) * part
    const refusal = await checkJsonCost(Buffer.from(body), most).then(() => '', (error: Error) => error.message)
    t.equal(refusal, '', `${what}: ${body.length} bytes`)
  }
})

const DENSE: [string, string][] = [
  [
    'permuted names',
    list(130_000, i => `{${[...'abcdefgh'].map((letter, at) => `"${letter.repeat(1 + (i >> (2 * at)) % 4)}":1`)}}`)
  ],
  ['names of fields', list(130_000, i => `{"${i.toString(36)}x":1}`)],
  ['wide objects', `{${list(330_000, i => `"k${i}":1`).slice(1, -1)}}`],
  ['objects', repeat(610_000, '{}')],
  ['lists', repeat(610_000, '[1]')],
  ['strings', list(850_000, i => `"${i}"`)],
  ['numbers', repeat(4_150_000, '1')],
  ['token ids as names', `{${list(600_000, i => `"${i}":1`).slice(1, -1)}}`],
  ['nesting', '['.repeat(700_000) + ']'.repeat(700_000)]
]

t.test('a body with too many values is refused by each kind of route before it is parsed', async t => {
  const { url } = await routeApp(t)
  for (const path of ['/generate', '/v1/chat/completions', '/v1/messages', '/update_weights_from_distributed']) {
    for (const [what, value] of DENSE) {
      const { status, text } = await call(url + path, undefined, { ...json, body: `{"ignored":${value}}` })
      t.equal(status, 413, `${path}: ${what}`)
      t.match(text, /has more values than can be parsed.*names of fields.*limit is (1677721|4194304).*--max-body-bytes/)
    }
  }
})

t.test('a gateway refuses such a body, too', async t => {
  const gateway = await gatewayTo(t, ['http://127.0.0.1:1'])
  for (const path of ['/generate', '/update_weights_from_distributed', '/unknown']) {
    const { status, text } = await call(gateway.url + path, undefined, { ...json, body: DENSE[0]![1] })
    t.equal(status, 413, path)
    t.match(text, /has more values than can be parsed/)
  }
})

t.test('--max-body-bytes raises the limit for all bodies, and does not lower it', async t => {
  const numbers = `{"ignored":${repeat(1_700_000, '1')}}`
  const { url } = await routeApp(t, { maxBodyBytes: 2 ** 24 })
  t.equal((await call(`${url}/generate`, undefined, { ...json, body: `{"text":"a",${numbers.slice(1)}` })).status, 200)
  t.equal(mostPoints('normal', 2 ** 24), 3_355_443)
  t.equal(mostPoints('normal', 1000), 1_677_721)
  t.equal(mostPoints('admin', 1000), 2 ** 22)
})

t.test('the event loop turns while a long body is counted', async t => {
  let turns = 0
  const turn = (): void => {
    turns++
    next = setImmediate(turn)
  }
  let next = setImmediate(turn)
  await checkJsonCost(Buffer.alloc(2 ** 26, ' '), Infinity)
  clearImmediate(next)
  t.ok(turns > 1, `${turns} turns`)
})
