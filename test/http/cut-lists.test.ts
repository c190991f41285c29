import { isDeepStrictEqual } from 'node:util'
import fc from 'fast-check'
import t from 'tap'
import { cutLists } from '../../src/http/cut-lists.ts'
import { checkJsonCost } from '../../src/http/json-cost.ts'
import { parseJsonText } from '../../src/http/parse-json.ts'

async function parse (text: string): Promise<{ value: unknown, lists: number }> {
  const bytes = Buffer.from(text)
  const { lists } = await checkJsonCost(bytes, Infinity)
  const { text: rest, cut } = await cutLists(bytes, lists)
  // Before the strings that are cut out are added.
  const count = cut?.values.length ?? 0
  return { value: parseJsonText(rest, cut), lists: count }
}

/** Values of which 16 KiB are one list, or several that are divided. */
const count = fc.integer({ min: 0, max: 60_000 })
const longList = fc.oneof(
  count.map(length => Array.from({ length }, (_, i) => i)),
  count.map(length => Array.from({ length }, (_, i) => -i / 7)),
  count.map(length => Array.from({ length }, (_, i) => [null, true, 1e300, 2 ** 53, -0, 12][i % 6]))
)

t.test('any body is read as JSON.parse reads it', async t => {
  const values = fc
    .letrec(tie => ({
      value: fc.oneof(
        { depthSize: 'small' },
        longList,
        fc.integer({ min: 1, max: 40_000 }).map(length => 'ä[1,2]'.repeat(length / 6)),
        fc.string({ unit: fc.constantFrom('[', ']', ',', '1', '"', '\\', ':') }),
        fc.array(tie('value'), { maxLength: 3 }),
        fc.dictionary(fc.constantFrom('a', 'b', '[1,2]'), tie('value'), { maxKeys: 3, noNullPrototype: true })
      )
    }))
    .value
  await fc.assert(
    fc.asyncProperty(values, fc.nat(1), async (value, indent) => {
      const text = JSON.stringify(value, null, indent)
      const { value: got } = await parse(text)
      t.ok(isDeepStrictEqual(got, JSON.parse(text)))
    }),
    { numRuns: 150 }
  )
})

t.test('long lists of numbers are cut out, and no others', async t => {
  const ids = Array.from({ length: 100_000 }, (_, i) => i * 3)
  const cases: [unknown, number][] = [
    [ids, 1],
    [{ a: ids, b: [ids, ids], c: [[ids]], text: 'x'.repeat(50_000) }, 4],
    [[...ids, 'a'], 0],
    [['a', ...ids], 0],
    [[...ids, []], 0],
    [[{}, ...ids], 0],
    [Array(5000).fill([1, 2]), 0]
  ]
  for (const [value, lists] of cases) {
    const text = JSON.stringify(value)
    const got = await parse(text)
    // A comparison by tap of lists this long takes seconds.
    t.ok(isDeepStrictEqual(got.value, value), text.slice(0, 40))
    t.equal(got.lists, lists, text.slice(0, 40))
  }
})

t.test('a list that is not valid is an error of JSON.parse, wherever the fault is', async t => {
  // Parts end near each 65,536th byte: with two bytes for each value, commas are at all odd places.
  const good = Array(100_000).fill('1')
  for (const fault of ['', ' ', '01', '1 2', '1.', '-', 'NaN', '1:1', '}', '1}', '\u00a0']) {
    for (const at of [0, 1, 32_766, 32_767, 32_768, 50_000, 65_535, 65_536, 99_999]) {
      const body = `{"a":[${good.with(at, fault)}]}`
      await t.rejects(parse(body), SyntaxError, `${JSON.stringify(fault)} at ${at}`)
    }
  }
  // The first part ends with the last comma.
  await t.rejects(parse(`[11,${'1,'.repeat(32_767)}]`), SyntaxError)
  const list = `[${good}]`
  for (const body of [`{${list}:1}`, `{${list} \n:1}`, `{"a":${list}`, `${list}${list}`, `"a"${list}`, `[${list},]`]) {
    await t.rejects(parse(body), SyntaxError, body.slice(0, 12))
  }
})

t.test('a value that is longer than a part is read', async t => {
  const value = [1, `${'1'.repeat(100)}.${'5'.repeat(200_000)}`, 2]
  t.same((await parse(`[${value}]`)).value, value.map(Number))
  t.same((await parse(`[1${' '.repeat(200_000)}]`)).value, [1])
  t.same((await parse(`[${' '.repeat(200_000)}]`)).value, [])
})

t.test('other callbacks run while a long list is parsed', async t => {
  const turns = { count: 0, isOver: false }
  const count = (): void => {
    turns.count++
    if (!turns.isOver) setImmediate(count)
  }
  const bytes = Buffer.from(`[${Array(4_000_000).fill('151643')}]`)
  const { lists } = await checkJsonCost(bytes, Infinity)
  setImmediate(count)
  const { text, cut } = await cutLists(bytes, lists)
  turns.isOver = true
  t.ok(text.length < 100 && cut?.values.length === 1)
  t.ok(turns.count > 3, `${turns.count} turns`)
})
