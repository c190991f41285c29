import t from 'tap'
import { join } from 'node:path'
import { RefitError } from '../../src/errors.ts'
import { packageRoot } from '../../src/root.ts'
import { loadTokenizer } from '../../src/text/tokenizer.ts'

const folder = (name: string): string => join(packageRoot, 'test', 'fixtures', 'text', name)
const text = 'Grüße, 12345 words <|im_end|> and\n  more. '.repeat(500)

for (const name of ['qwen-like', 'llama2-like', 'llama3-like', 'metaspace-like', 'suffix-like']) {
  t.test(`${name}: another thread makes the same ids and prompts`, async t => {
    const tokenizer = (await loadTokenizer(folder(name)))!
    const { background } = tokenizer
    for (const part of [text, '', 'x'.repeat(20_000)]) {
      for (const addSpecialTokens of [true, false]) {
        const ids = await background!.encode(part, { addSpecialTokens })
        t.same(Array.from(ids), tokenizer.encode(part, { addSpecialTokens }))
      }
    }
    if (!tokenizer.hasChatTemplate) return
    const messages = [{ role: 'user', content: text }]
    const options = { tools: [], kwargs: { a: 1 } }
    t.equal(
      await background!.applyChatTemplate(messages, options),
      tokenizer.applyChatTemplate(messages, options)
    )
  })

  t.test(`${name}: no token stands for more bytes than longestToken`, async t => {
    const tokenizer = (await loadTokenizer(folder(name)))!
    for (let id = 0; id < tokenizer.vocabSize; id++) {
      const bytes = Buffer.byteLength(tokenizer.idToText(id))
      // A part of a character is U+FFFD, three bytes, in the text of a token.
      if (bytes > tokenizer.longestToken! && !tokenizer.idToText(id).includes('\ufffd')) {
        t.fail(`token ${id} has ${bytes} bytes, and longestToken is ${tokenizer.longestToken}`)
      }
    }
    t.ok(Buffer.byteLength(text) <= tokenizer.encode(text).length * tokenizer.longestToken!)
  })
}

t.test('a refusal of the template on the other thread keeps its code, message and field', async t => {
  const tokenizer = (await loadTokenizer(folder('qwen-like')))!
  const refusalOf = async (render: () => unknown): Promise<unknown> => {
    try {
      return await render()
    } catch (error) {
      const { code, message, param } = error as RefitError
      return error instanceof RefitError ? { code, message, param } : error
    }
  }
  for (const messages of [[], [{ role: 'user', content: [{ type: 'image' }] }]]) {
    const here = await refusalOf(() => tokenizer.applyChatTemplate(messages))
    t.same(await refusalOf(async () => await tokenizer.background!.applyChatTemplate(messages)), here)
    t.hasProps(here as object, ['code', 'message', 'param'])
  }
})
