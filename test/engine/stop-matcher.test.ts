import t from 'tap'
import fc from 'fast-check'
import { StopMatcher } from '../../src/engine/scheduling/stop-matcher.ts'

function run (stops: string[], pieces: string[], keep = false): { text: string, matched: string | null } {
  const matcher = new StopMatcher(stops, keep)
  let text = ''
  for (const piece of pieces) {
    const outcome = matcher.push(piece)
    text += outcome.text
    if (outcome.matched !== null) return { text, matched: outcome.matched }
  }
  return { text: text + matcher.flush(), matched: null }
}

t.test('a stop string is found across pieces, and trimmed unless it is to be kept', async (t) => {
  t.same(run(['###'], ['ab#', '#', '#cd']), { text: 'ab', matched: '###' })
  t.same(run(['###'], ['ab#', '#', '#cd'], true), { text: 'ab###', matched: '###' })
  t.same(run(['###'], ['ab#', '#x#', '#']), { text: 'ab##x##', matched: null })
  t.same(run(['aab'], ['aa', 'ab']), { text: 'a', matched: 'aab' }, 'a match that begins inside a failed one')
})

t.test('only text that may become a stop string is held back', async (t) => {
  const matcher = new StopMatcher(['END', 'NDX'], false)
  t.same(matcher.push('the E'), { text: 'the ', matched: null })
  t.same(matcher.push('N'), { text: '', matched: null })
  t.same(matcher.push('o'), { text: 'ENo', matched: null })
  t.equal(matcher.flush(), '')
})

t.test('empty stop strings are no stop strings', async (t) => {
  t.same(run([''], ['abc']), { text: 'abc', matched: null })
})

t.test('a long repetitive stop string takes linear time', async (t) => {
  const stop = 'a'.repeat(20_000) + 'c'
  t.same(run([stop], Array.from({ length: 3000 }, () => 'a'.repeat(9) + 'b')).matched, null)
  t.same(run([stop], Array.from({ length: 30_000 }, () => 'a')).text.length, 30_000)
})

t.test('thousands of samples with one long stop string share its tables', async (t) => {
  const stops = ['a'.repeat(1 << 20)]
  const before = process.memoryUsage().arrayBuffers
  const matchers = Array.from({ length: 100 }, () => new StopMatcher(stops, false))
  t.ok(process.memoryUsage().arrayBuffers - before < 16 << 20, 'one table of 4 MB')
  t.same(matchers.map((matcher) => matcher.push('ab').text), Array(100).fill('ab'))
})

t.test('a piece that is not shown counts for stop strings only', async (t) => {
  const matcher = new StopMatcher(['a<x>', '<x><x>'], false)
  t.same(matcher.push('ba'), { text: 'b', matched: null })
  t.same(matcher.push('<y>', true, false), { text: 'a', matched: null })
  t.same(matcher.push('c'), { text: 'c', matched: null })
  t.same(matcher.push('<x>', true, false), { text: '', matched: null })
  t.equal(matcher.flush(), '')
  t.same(matcher.push('aa'), { text: 'a', matched: null })
  t.same(matcher.push('<x>', true, false), { text: '', matched: 'a<x>' })
})

t.test('the stop string that is complete first ends the text, wherever the text is cut', async () => {
  const small = fc.string({ unit: fc.constantFrom('a', 'b', '😀'), maxLength: 4 })
  fc.assert(
    fc.property(
      fc.array(small, { maxLength: 3 }),
      fc.array(fc.string({ unit: fc.constantFrom('a', 'b', '😀'), maxLength: 5 }), { maxLength: 8 }),
      fc.boolean(),
      (stops, pieces, keep) => {
        const whole = pieces.join('')
        const hits = stops
          .filter((stop) => stop !== '')
          .map((stop) => ({ stop, end: whole.indexOf(stop) + stop.length }))
          .filter(({ stop }) => whole.includes(stop))
        hits.sort((a, b) => a.end - b.end || b.stop.length - a.stop.length)
        const first = hits[0]
        const expected = first === undefined
          ? { text: whole, matched: null }
          : { text: whole.slice(0, keep ? first.end : first.end - first.stop.length), matched: first.stop }
        const got = run(stops, pieces, keep)
        if (got.text !== expected.text || got.matched !== expected.matched) {
          throw new Error(`${JSON.stringify(got)}, expected ${JSON.stringify(expected)}`)
        }
      }
    ),
    { numRuns: 2000 }
  )
})
