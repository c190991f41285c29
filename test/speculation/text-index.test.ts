import t from 'tap'
import fc from 'fast-check'
import { TextIndex } from '../../src/engine/speculation/text-index.ts'
import type { Text } from '../../src/engine/speculation/text-index.ts'
import type { GuessRates } from '../../src/engine/speculation/guess-rates.ts'

/** Every guess is right in `rate` of all cases. A class is the length of its match, and its percentage of the votes. */
function rates (rate: number): GuessRates {
  const fixed: Pick<GuessRates, 'classOf' | 'of'> = {
    classOf: (matched, share) => matched * 1000 + Math.round(share * 100),
    of: () => rate
  }
  return fixed as GuessRates
}

/** A text that grows in an array with room, as a sequence does. */
function growing (...tokens: number[]): Text & { push: (...more: number[]) => void } {
  const text = {
    tokens: Int32Array.from(tokens),
    length: tokens.length,
    push (...more: number[]): void {
      const kept = text.tokens.slice(0, text.length)
      text.tokens = new Int32Array(text.length + more.length + 5).fill(77)
      text.tokens.set(kept)
      text.tokens.set(more, text.length)
      text.length += more.length
    }
  }
  return text
}

function indexOf (...texts: Text[]): TextIndex {
  const index = new TextIndex()
  for (const text of texts) index.add(text, 0)
  index.update(1e9)
  return index
}

t.test('a text goes on as another that has the same tokens', async t => {
  const other = growing(1, 2, 3, 4, 5, 6, 7, 8)
  const text = growing(9, 3, 4, 5)
  const index = indexOf(other, text)
  t.same(index.draft(text, 10, rates(0.5), 0), {
    tokens: [6, 7, 8],
    classes: [3100, 4100, 5100],
    chances: [0.5, 0.25, 0.125]
  })
  t.same(index.draft(text, 2, rates(0.5), 0).tokens, [6, 7], 'at most as many as asked for')
  t.same(index.draft(text, 10, rates(0.5), 0.3).tokens, [6, 7], 'up to the first that is unlikely')
  text.push(6, 7)
  other.push(10, 11)
  index.update(1e9)
  t.same(index.draft(text, 10, rates(1), 0).tokens, [8, 10, 11], 'both have grown')
  text.push(12)
  index.update(1e9)
  t.same(index.draft(text, 10, rates(1), 0).tokens, [], 'no text has these last tokens')
})

t.test('a long text is found from its beginning to its end', async t => {
  const long = growing(...Array.from({ length: 5000 }, (_, i) => 7 * i))
  for (const at of [3, 10, 130, 600, 4000]) {
    const text = growing(...[at - 3, at - 2, at - 1].map(i => 7 * i))
    t.same(indexOf(long, text).draft(text, 2, rates(1), 0).tokens, [7 * at, 7 * (at + 1)])
  }
})

t.test('a long text is taken in over several updates', async t => {
  const long = growing(...Array.from({ length: 100 }, (_, i) => 7 * i))
  const text = growing(350, 357, 364)
  const index = new TextIndex()
  index.add(long, 0)
  index.add(text, 0)
  t.equal(index.update(30), 30)
  t.same(index.draft(text, 1, rates(1), 0).tokens, [])
  t.equal(index.update(30), 30)
  t.same(index.draft(text, 1, rates(1), 0).tokens, [371])
  t.equal(index.update(60), 98 + 1 - 60, 'the rest')
  t.equal(index.update(60), 0)
})

t.test('two tokens are too few to match, and the end of a text leads nowhere', async t => {
  const text = growing(8, 2, 3)
  t.same(indexOf(growing(1, 2, 3, 4), text).draft(text, 10, rates(1), 0).tokens, [])
  t.same(indexOf(growing(8, 2, 3), text).draft(text, 10, rates(1), 0).tokens, [])
  const short = growing(2, 3)
  t.same(indexOf(growing(1, 2, 3, 4), short).draft(short, 10, rates(1), 0).tokens, [])
})

t.test('a text repeats itself', async t => {
  const text = growing(1, 2, 3, 1, 2, 3, 1, 2, 3)
  t.same(indexOf(text).draft(text, 4, rates(1), 0).tokens, [1, 2, 3, 1])
})

t.test('longer matches have more weight, and those that disagree lower the chance', async t => {
  const text = growing(5, 6, 7, 8)
  const index = indexOf(growing(5, 6, 7, 8, 20, 21), growing(0, 6, 7, 8, 30, 31), text)
  // Matches of 4 and of 3 tokens weigh 16 and 9.
  t.same(index.draft(text, 2, rates(1), 0), { tokens: [20, 21], classes: [4064, 5100], chances: [1, 1] })
  const three = indexOf(growing(5, 6, 7, 8, 20), growing(0, 6, 7, 8, 30), growing(1, 6, 7, 8, 30, 31), text)
  t.same(three.draft(text, 2, rates(1), 0), { tokens: [30, 31], classes: [3053, 4100], chances: [1, 1] }, 'two to one')
})

t.test('tokens at and before `from` are no guesses', async t => {
  const index = new TextIndex()
  index.add(growing(1, 2, 3, 4, 5), 3)
  const [early, late] = [growing(1, 2, 3), growing(2, 3, 4)]
  index.add(early, 0)
  index.add(late, 0)
  index.update(1e9)
  t.same(index.draft(early, 4, rates(1), 0).tokens, [])
  t.same(index.draft(late, 4, rates(1), 0).tokens, [5])
})

t.test('every guess follows a place whose tokens match, however many texts there are', async () => {
  const token = fc.nat(3)
  fc.assert(fc.property(
    fc.array(fc.array(token, { maxLength: 90 }), { minLength: 1, maxLength: 8 }),
    fc.array(token, { minLength: 3, maxLength: 12 }),
    (lists, own) => {
      const texts = lists.map(list => growing(...list))
      const text = growing(...own)
      const index = new TextIndex()
      for (const other of [...texts, text]) index.add(other, 0)
      index.update(1e9)
      for (const [i, other] of texts.entries()) other.push(...lists[(i + 1) % lists.length]!)
      index.update(1e9)
      const all = [...texts, text].map(other => other.tokens.subarray(0, other.length).join(','))
      const { tokens } = index.draft(text, 8, rates(1), 0)
      const has = (part: number[]): boolean => all.some(whole => `,${whole},`.includes(`,${part.join(',')},`))
      const tail = own.slice(-3)
      if (tokens.length > 0 && !has([...tail, ...tokens])) throw new Error(`no text has ${[...tail, ...tokens].join()}`)
      const first = [0, 1, 2, 3].some(next => has([...tail, next]))
      if (first !== tokens.length > 0) throw new Error('a continuation was missed')
    }
  ))
})
