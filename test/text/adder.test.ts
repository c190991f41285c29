import { readFile } from 'node:fs/promises'
import { join } from 'node:path'
import fc from 'fast-check'
import t from 'tap'
import { packageRoot } from '../../src/root.ts'
import { loadTokenizer } from '../../src/text/tokenizer.ts'

const MODELS = ['adder-base', 'adder'].map(name => join(packageRoot, 'models', name))
const EOS = 256

t.test('both adders have the same tokenizer and configuration and differ only in their weights', async t => {
  for (const file of ['config.json', 'generation_config.json', 'tokenizer.json', 'tokenizer_config.json']) {
    const [base, trained] = await Promise.all(MODELS.map(dir => readFile(join(dir, file), 'utf8')))
    t.equal(base, trained, file)
  }
  const [base, trained] = await Promise.all(MODELS.map(dir => readFile(join(dir, 'model.safetensors'))))
  t.equal(base!.length, trained!.length)
  t.ok(base!.length < 2_000_000)
  t.notOk(base!.equals(trained!))
})

t.test('its tokens are the bytes and four special tokens, one for each row of the embedding', async t => {
  const tokenizer = (await loadTokenizer(MODELS[0]!))!
  const config = JSON.parse(await readFile(join(MODELS[0]!, 'config.json'), 'utf8'))
  t.equal(tokenizer.vocabSize, config.vocab_size)
  t.equal(tokenizer.eosTokenId, config.eos_token_id)
  t.equal(tokenizer.eosTokenId, EOS)
  t.same([...tokenizer.specialIds].sort(), [256, 257, 258, 259])
  t.same(tokenizer.encode('12+345='), [...Buffer.from('12+345=')])
  fc.assert(
    fc.property(fc.string({ unit: 'binary', maxLength: 60 }), text => {
      fc.pre(!text.includes('<|'))
      const ids = tokenizer.encode(text)
      return Buffer.from(ids).equals(Buffer.from(text, 'utf8')) && tokenizer.decode(ids) === text
    }),
    { numRuns: 1000 }
  )
})

t.test('streamed text equals what TextDecoder gives for any bytes', async t => {
  const tokenizer = (await loadTokenizer(MODELS[0]!))!
  fc.assert(
    fc.property(fc.array(fc.integer({ min: 0, max: 255 }), { maxLength: 24 }), ids => {
      const detokenizer = tokenizer.detokenizer()
      const text = ids.map(id => detokenizer.push([id])).join('') + detokenizer.flush()
      return text === new TextDecoder('utf-8', { ignoreBOM: true }).decode(Uint8Array.from(ids))
    }),
    { numRuns: 3000 }
  )
})

t.test('its chat template has the form that it was trained on, and refuses other roles', async t => {
  const tokenizer = (await loadTokenizer(MODELS[1]!))!
  const messages = [{ role: 'system', content: 'S' }, { role: 'user', content: '1+2=' }, {
    role: 'assistant',
    content: '3'
  }, { role: 'user', content: '4+5=' }]
  t.equal(
    tokenizer.applyChatTemplate(messages),
    '<|system|>S<|user|>1+2=<|assistant|>3<|endoftext|><|user|>4+5=<|assistant|>'
  )
  t.same(tokenizer.encode('<|user|>7<|assistant|>'), [258, 0x37, 259])
  t.throws(() => tokenizer.applyChatTemplate([{ role: 'tool', content: '3' }]), {
    code: 'INVALID_REQUEST',
    message: /roles system, user and assistant, not tool/
  })
})

t.test('the prompts to measure on are 500 different sums of two three-digit numbers', async t => {
  const lines = (await readFile(join(packageRoot, 'examples/adder/prompts.txt'), 'utf8')).trimEnd().split('\n')
  t.equal(new Set(lines).size, 500)
  t.ok(lines.every(line => /^[1-9]\d\d\+[1-9]\d\d=$/.test(line)))
})
