import { mkdtemp, readFile, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import t from 'tap'
import { packageRoot } from '../../src/root.ts'
import { loadTokenizer } from '../../src/text/tokenizer.ts'

const FIXTURES = join(packageRoot, 'test/fixtures/text')
const NAMES = ['qwen-like', 'llama3-like', 'llama2-like', 'metaspace-like', 'suffix-like']

interface Golden {
  encodings: { text: string, ids: number[], with_special: number[], decoded: string | null }[]
  decodings: { ids: number[], text: string, skipped: string }[]
}

async function golden (name: string): Promise<Golden> {
  return JSON.parse(await readFile(join(FIXTURES, name, 'golden.json'), 'utf8'))
}

for (const name of NAMES) {
  t.test(`${name}: texts become the ids that the Python library gives, and ids the same text`, async t => {
    const tokenizer = (await loadTokenizer(join(FIXTURES, name)))!
    const { encodings, decodings } = await golden(name)
    t.ok(encodings.filter(({ decoded }) => decoded !== null).length >= 20)
    t.equal(decodings.length, 60)
    for (const { text, ids, with_special: withSpecial, decoded } of encodings) {
      const got = {
        ids: tokenizer.encode(text, { addSpecialTokens: false }),
        withSpecial: tokenizer.encode(text),
        decoded: decoded === null ? null : tokenizer.decode(ids)
      }
      t.strictSame(got, { ids, withSpecial, decoded }, JSON.stringify(text.slice(0, 40)))
    }
    const got = decodings.map(({ ids }) => ({
      ids,
      text: tokenizer.decode(ids),
      skipped: tokenizer.decode(ids, { skipSpecialTokens: true })
    }))
    t.strictSame(got, decodings)
  })

  t.test(`${name}: unknown ids give no text and do not change the text of their neighbours`, async t => {
    const tokenizer = (await loadTokenizer(join(FIXTURES, name)))!
    const ids = tokenizer.encode('weights', { addSpecialTokens: false })
    const strange = [tokenizer.vocabSize, 151_935, 2 ** 31 - 1, -1, 0.5, NaN]
    t.equal(tokenizer.decode([...strange, ...ids, ...strange]), tokenizer.decode(ids))
    t.equal(tokenizer.decode(strange), '')
    t.equal(tokenizer.decode([]), '')
    t.equal(tokenizer.idToText(151_935), '')
  })
}

t.test('the special tokens and the size of the vocabulary are known', async t => {
  const qwen = (await loadTokenizer(join(FIXTURES, 'qwen-like')))!
  const size = qwen.vocabSize
  t.equal(qwen.decode([size - 1]), '工具')
  t.equal(qwen.idToText(size), '')
  t.equal(qwen.decode([qwen.bosTokenId!, qwen.eosTokenId!]), '<|endoftext|><|end|>')
  t.same([...qwen.specialIds].map(id => qwen.idToText(id)), ['<|endoftext|>', '<|user|>', '<|end|>'])
  t.ok(qwen.hasChatTemplate)
  const llama = (await loadTokenizer(join(FIXTURES, 'llama2-like')))!
  t.same([llama.bosTokenId, llama.eosTokenId], [1, 2])
  t.notOk(llama.hasChatTemplate)
  const bare = (await loadTokenizer(join(FIXTURES, 'llama3-like')))!
  t.same([bare.bosTokenId, bare.eosTokenId], [null, null])
})

t.test('a token alone keeps its space, and parts of a character are marked', async t => {
  const llama = (await loadTokenizer(join(FIXTURES, 'llama2-like')))!
  const [first] = llama.encode('the', { addSpecialTokens: false })
  t.equal(llama.idToText(first!), ' the')
  t.equal(llama.decode([first!]), 'the')
  const qwen = (await loadTokenizer(join(FIXTURES, 'qwen-like')))!
  const ids = qwen.encode('🦑', { addSpecialTokens: false })
  t.ok(ids.length > 1)
  t.match(qwen.idToText(ids[0]!), /^\ufffd+$/)
  t.equal(qwen.idToText(qwen.eosTokenId!), '<|end|>')
})

t.test('typed arrays of ids decode as arrays do', async t => {
  const qwen = (await loadTokenizer(join(FIXTURES, 'qwen-like')))!
  const ids = qwen.encode('größer 🚀')
  t.equal(qwen.decode(Int32Array.from(ids)), 'größer 🚀')
})

t.test('spaces before punctuation stay, whatever the value of clean_up_tokenization_spaces', async t => {
  const dir = await mkdtemp(join(tmpdir(), 'refit-text-'))
  await writeFile(join(dir, 'tokenizer.json'), await readFile(join(FIXTURES, 'metaspace-like/tokenizer.json')))
  await writeFile(join(dir, 'tokenizer_config.json'), '{"clean_up_tokenization_spaces": true}')
  const tokenizer = (await loadTokenizer(dir))!
  t.equal(tokenizer.decode(tokenizer.encode('the , trainer .')), 'the , trainer .')
})

t.test('a folder without tokenizer.json has no tokenizer', async t => {
  const dir = await mkdtemp(join(tmpdir(), 'refit-text-'))
  t.equal(await loadTokenizer(dir), null)
  t.equal(await loadTokenizer(join(dir, 'absent')), null)
  await writeFile(join(dir, 'tokenizer_config.json'), '{}')
  t.equal(await loadTokenizer(dir), null)
})

t.test('a broken tokenizer is refused with the name of its file', async t => {
  const dir = await mkdtemp(join(tmpdir(), 'refit-text-'))
  for (
    const text of [
      '',
      '{',
      '[]',
      'null',
      '7',
      '{}',
      '{"model": {}}',
      '{"model":{"type":"Strange"},"decoder":null,"post_processor":null,"pre_tokenizer":null,"normalizer":null}'
    ]
  ) {
    await writeFile(join(dir, 'tokenizer.json'), text)
    await t.rejects(loadTokenizer(dir), { code: 'MODEL_CONFIG', message: join(dir, 'tokenizer.json') }, text)
  }
  await writeFile(join(dir, 'tokenizer.json'), await readFile(join(FIXTURES, 'qwen-like/tokenizer.json')))
  await writeFile(join(dir, 'tokenizer_config.json'), 'no')
  await t.rejects(loadTokenizer(dir), { code: 'MODEL_CONFIG', message: join(dir, 'tokenizer_config.json') })
})

t.test('the vocabulary has the text of every token as bytes, and its special tokens', async t => {
  for (const name of NAMES.filter(name => name !== 'suffix-like')) {
    const tokenizer = (await loadTokenizer(join(FIXTURES, name)))!
    const { bytes, offsets, special } = tokenizer.vocabulary!
    t.equal(offsets.length, tokenizer.vocabSize + 1)
    t.equal(offsets.at(-1), bytes.length)
    t.same(new Set(special), tokenizer.specialIds)
    let same = 0
    for (let id = 0; id < tokenizer.vocabSize; id++) {
      const text = Buffer.from(bytes.subarray(offsets[id], offsets[id + 1])).toString()
      if (text === tokenizer.idToText(id)) same++
    }
    t.equal(same, tokenizer.vocabSize, name)
    // The bytes of a text's tokens, joined, are the text, except for the space that some tokenizers put before it.
    const ids = tokenizer.encode('naïve 中文 x😀', { addSpecialTokens: false })
    const joined = Buffer.concat(ids.map(id => bytes.subarray(offsets[id], offsets[id + 1]))).toString()
    t.equal(joined.trimStart(), tokenizer.decode(ids).trimStart(), name)
  }
  t.equal((await loadTokenizer(join(FIXTURES, 'suffix-like')))!.vocabulary, undefined, 'its decoder has no byte form')
})
