import { join } from 'node:path'
import fc from 'fast-check'
import t from 'tap'
import { packageRoot } from '../../src/root.ts'
import type { DetokenizerOptions, Tokenizer } from '../../src/text/tokenizer.ts'
import { loadTokenizer } from '../../src/text/tokenizer.ts'

const open = async (name: string) => (await loadTokenizer(join(packageRoot, 'test/fixtures/text', name)))!

function stream (tokenizer: Tokenizer, parts: readonly (readonly number[])[], options: DetokenizerOptions): string {
  const detokenizer = tokenizer.detokenizer(options)
  return parts.map(part => detokenizer.push(part)).join('') + detokenizer.flush()
}

/**
 * Ids cut into pieces at any place: the whole vocabulary, unknown ids, special ones, texts, and mostly single bytes,
 * which break characters.
 */
function pieces (tokenizer: Tokenizer): fc.Arbitrary<number[][]> {
  const any = fc.integer({ min: 0, max: tokenizer.vocabSize + 3 })
  const bytes = fc.integer({ min: 0, max: 260 })
  const special = fc.constantFrom(...tokenizer.specialIds)
  const text = fc.string({ unit: 'binary', maxLength: 12 }).map(text =>
    tokenizer.encode(text, { addSpecialTokens: false })
  )
  const run = fc.oneof(
    fc.array(fc.oneof(any, bytes, special), { maxLength: 12 }),
    fc.array(bytes, { maxLength: 12 }),
    text
  )
  return fc.tuple(fc.array(run, { maxLength: 8 }), fc.infiniteStream(fc.integer({ min: 0, max: 4 }))).map(
    ([runs, lengths]) => {
      const ids = runs.flat()
      const parts = []
      for (let at = 0; at < ids.length;) {
        const length = lengths.next().value
        parts.push(ids.slice(at, at + length))
        at += length
      }
      return parts
    }
  )
}

for (const name of ['qwen-like', 'llama3-like', 'llama2-like', 'metaspace-like', 'suffix-like']) {
  t.test(`${name}: pushes and flush, joined, are the decoding of all ids, wherever they are cut`, async t => {
    const tokenizer = await open(name)
    fc.assert(
      fc.property(pieces(tokenizer), fc.boolean(), (parts, skipSpecialTokens) => {
        return stream(tokenizer, parts, { skipSpecialTokens }) === tokenizer.decode(parts.flat(), { skipSpecialTokens })
      }),
      { numRuns: 2000 }
    )
  })

  t.test(`${name}: with the prompt as context, the pushed text is the rest of the whole text`, async t => {
    const tokenizer = await open(name)
    const words = fc.array(fc.constantFrom('the', ' rollout', '  weights', 'ing', ' 1234', '.', ' größer', '\n'), {
      minLength: 1,
      maxLength: 12
    })
    fc.assert(
      fc.property(words, words, (before, after) => {
        const prompt = tokenizer.encode(before.join(''), { addSpecialTokens: false })
        const all = tokenizer.encode([...before, ...after].join(''), { addSpecialTokens: false })
        // The comparison is possible only if the prompt's tokens are a prefix of all tokens.
        fc.pre(prompt.length > 0 && prompt.every((id, index) => all[index] === id))
        const whole = tokenizer.decode(all)
        const prefix = tokenizer.decode(prompt)
        return prefix + stream(tokenizer, [all.slice(prompt.length)], { context: prompt }) === whole
      }),
      { numRuns: 1000 }
    )
  })
}

for (const name of ['qwen-like', 'llama2-like', 'metaspace-like']) {
  t.test(`${name}: a character is returned with its last byte, and never in parts`, async t => {
    const tokenizer = await open(name)
    const text = 'Straße 重み 👍🏽 ok'
    const ids = tokenizer.encode(text, { addSpecialTokens: false })
    const detokenizer = tokenizer.detokenizer()
    let given = ''
    for (let count = 1; count <= ids.length; count++) {
      given += detokenizer.push([ids[count - 1]!])
      t.equal(given, tokenizer.decode(ids.slice(0, count)).replace(/\ufffd+$/, ''))
    }
    t.equal(detokenizer.flush(), '')
    t.equal(given, tokenizer.decode(ids))
  })
}

t.test('the flush returns an unfinished character as one U+FFFD, and the stream can continue', async t => {
  const tokenizer = await open('qwen-like')
  const ids = tokenizer.encode('ok🦑', { addSpecialTokens: false })
  const detokenizer = tokenizer.detokenizer()
  t.equal(detokenizer.push(ids.slice(0, -1)), 'ok')
  t.equal(detokenizer.flush(), '\ufffd')
  t.equal(detokenizer.flush(), '')
  t.equal(detokenizer.push(tokenizer.encode('more')), 'more')
})

t.test('special tokens that are left out do not separate the bytes of a character', async t => {
  const tokenizer = await open('qwen-like')
  const ids = tokenizer.encode('🦑', { addSpecialTokens: false })
  const mixed = ids.flatMap(id => [tokenizer.eosTokenId!, id])
  t.equal(stream(tokenizer, mixed.map(id => [id]), { skipSpecialTokens: true }), '🦑')
  t.notOk(stream(tokenizer, mixed.map(id => [id]), {}).includes('🦑'))
})

t.test('the space before the first word stays if the text continues a prompt', async t => {
  for (const name of ['llama2-like', 'metaspace-like']) {
    const tokenizer = await open(name)
    const ids = tokenizer.encode('the rollout', { addSpecialTokens: false })
    t.equal(stream(tokenizer, [ids], {}), 'the rollout', name)
    t.equal(stream(tokenizer, [ids], { context: [5] }), ' the rollout', name)
    t.equal(stream(tokenizer, [ids], { context: [] }), 'the rollout', name)
  }
})

t.test('two detokenizers of one tokenizer are independent', async t => {
  const tokenizer = await open('qwen-like')
  const ids = tokenizer.encode('🦑🦀', { addSpecialTokens: false })
  const one = tokenizer.detokenizer()
  const two = tokenizer.detokenizer()
  let texts = ['', '']
  for (const id of ids) texts = [texts[0] + one.push([id]), texts[1] + two.push([id])]
  t.same(texts, ['🦑🦀', '🦑🦀'])
})
