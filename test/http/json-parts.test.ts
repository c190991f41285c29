import Fastify from 'fastify'
import fc from 'fast-check'
import t from 'tap'
import { jsonParts, LazyList, sendJson } from '../../src/http/json-parts.ts'
import { OrderedObject, stringify } from '../../src/http/ordered-json.ts'
import { hasTime, nextTurn } from '../../src/http/turns.ts'

const others = fc.constantFrom(null, undefined, NaN, 'x'.repeat(20_000))
const leaves = fc.oneof(fc.string(), fc.double(), fc.boolean(), others)
const { value: values } = fc.letrec(tie => ({
  value: fc.oneof(
    { depthSize: 'small' },
    leaves,
    fc.array(tie('value'), { maxLength: 5 }),
    fc.array(fc.integer(), { maxLength: 2000, size: 'max' }),
    fc.array(tie('value'), { maxLength: 5 }).map(list => new LazyList(list.length, i => list[i])),
    fc.dictionary(fc.string(), tie('value'), { maxKeys: 4 }),
    fc.dictionary(fc.string(), leaves).map(fields => new OrderedObject(Object.entries(fields)))
  )
}))

t.test('the parts of a text, joined, are what stringify writes', async t => {
  fc.assert(
    fc.property(values.filter(value => value !== undefined), value => {
      t.equal([...jsonParts(value)].join(''), stringify(value))
    }),
    { numRuns: 200 }
  )
})

t.test('a large list is written in many small parts', async t => {
  const rows = new LazyList(100_000, i => [i / 3, i, null])
  const parts = [...jsonParts({ rows, ids: Array.from({ length: 100_000 }, (_, i) => i) })]
  t.ok(parts.length > 50)
  t.ok(parts.every(part => part.length < 40_000))
  t.same(JSON.parse(parts.join('')), {
    rows: rows.toJSON(),
    ids: Array.from({ length: 100_000 }, (_, i) => i)
  })
})

t.test('a reply of any value is what stringify writes', async t => {
  const app = Fastify()
  let value: unknown
  app.get('/', async (_request, reply) => await sendJson(reply, value))
  t.teardown(async () => await app.close())
  await fc.assert(
    fc.asyncProperty(values.filter(value => value !== undefined), async made => {
      value = made
      t.equal((await app.inject('/')).body, stringify(made))
    }),
    { numRuns: 100 }
  )
})

t.test('short replies have a length, long ones come in chunks, and both are the same JSON', async t => {
  const app = Fastify()
  app.get<{ Querystring: { n: number } }>(
    '/',
    async (request, reply) => await sendJson(reply, { list: new LazyList(Number(request.query.n), i => ({ i })) })
  )
  t.teardown(async () => await app.close())
  const url = await app.listen({ port: 0 })
  for (const n of [0, 10, 100_000]) {
    const reply = await fetch(`${url}/?n=${n}`)
    t.equal(reply.headers.has('content-length'), n < 100_000)
    t.match(reply.headers.get('content-type'), /^application\/json/)
    t.same(await reply.json(), { list: Array.from({ length: n }, (_, i) => ({ i })) })
  }
})

t.test('other callbacks run while several callers have work without end', async t => {
  const ended = new AbortController()
  const work = async (): Promise<void> => {
    while (!ended.signal.aborted) if (!hasTime()) await nextTurn()
  }
  const workers = [work(), work(), work()]
  for (let turns = 0; turns < 20; turns++) await new Promise(resolve => setImmediate(resolve))
  ended.abort()
  await Promise.all(workers)
  t.pass('20 turns of the event loop came')
})
