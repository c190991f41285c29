import t from 'tap'
import { ByteTokenizer } from '../helpers/byte-tokenizer.ts'
import { FakeEngine } from '../helpers/fake-engine.ts'
import { call, routeApp } from '../helpers/route-app.ts'

const CONTEXT = 100

/** Counts the characters that it reads on each thread. One token stands for at most four bytes. */
class Spy extends ByteTokenizer {
  readonly longestToken = 4
  here = 0
  there = 0

  override encode (text: string): number[] {
    this.here += text.length
    return super.encode(text)
  }

  readonly background = {
    encode: async (text: string): Promise<number[]> => {
      this.there += text.length
      return super.encode(text)
    },
    applyChatTemplate: async (...args: Parameters<ByteTokenizer['applyChatTemplate']>): Promise<string> => {
      this.there += JSON.stringify(args[0]).length
      return super.applyChatTemplate(...args)
    }
  }
}

async function app (t: Parameters<typeof routeApp>[0], contextLength = CONTEXT) {
  const tokenizer = new Spy()
  const engine = new FakeEngine({ info: { contextLength } })
  return { ...await routeApp(t, { engine, tokenizer, maxBatch: 8, toolCallParser: 'hermes' }), tokenizer }
}

const chat = (content: string): object => ({ messages: [{ role: 'user', content }] })
const routes = (text: string): [path: string, body: object][] => [
  ['/generate', { text }],
  ['/generate', { text: ['a', text] }],
  ['/v1/completions', { prompt: text }],
  ['/v1/completions', { prompt: ['a', text] }],
  ['/v1/chat/completions', chat(text)],
  ['/v1/chat/completions/render', chat(text)],
  ['/v1/responses', { input: text }],
  ['/v1/messages', { max_tokens: 1, ...chat(text) }],
  ['/v1/messages/count_tokens', chat(text)],
  ['/generate/', { prompts: [text] }],
  ['/chat/', { messages: [(chat(text) as { messages: object[] }).messages] }]
]

t.test('a text with more bytes than the context can hold is refused unread, with both numbers', async t => {
  const { url, tokenizer } = await app(t)
  for (const [path, body] of routes('é'.repeat(CONTEXT * 2 + 1))) {
    tokenizer.here = tokenizer.there = 0
    const { status, text } = await call(url + path, body)
    t.equal(status, 400, path)
    t.match(text, /PROMPT_TOO_LONG|invalid_request_error/, path)
    t.match(text, /\(4\d\d bytes\).*100 tokens of at most 4 bytes, so at most 400 bytes/, path)
    t.equal(tokenizer.here + tokenizer.there, 0, `${path} reads nothing`)
  }
})

t.test('a text that is cut to the context may be longer', async t => {
  const { url } = await app(t)
  const long = 'a'.repeat(CONTEXT * 4 + 1)
  for (
    const [path, body] of [
      ['/v1/completions', { prompt: long, truncate_prompt_tokens: 5, max_tokens: 1 }],
      ['/v1/chat/completions', { ...chat(long), truncate_prompt_tokens: 5, max_tokens: 1 }],
      ['/generate/', { prompts: [long], truncate_prompt_tokens: 5, max_tokens: 1 }],
      ['/tokenize', { prompt: long }]
    ] as const
  ) t.equal((await call(url + path, body)).status, 200, path)
})

t.test('long texts are read on another thread, short ones on this one', async t => {
  const { url, tokenizer } = await app(t, 1_000_000)
  for (const length of [10, 20_000]) {
    const text = 'a'.repeat(length)
    for (
      const [path, body] of [
        ['/generate', { text, sampling_params: { max_new_tokens: 1 } }],
        ['/generate', { text: [text, text], sampling_params: { max_new_tokens: 1 } }],
        ['/v1/completions', { prompt: text, max_tokens: 1 }],
        ['/v1/chat/completions', { ...chat(text), max_tokens: 1 }],
        ['/v1/responses', { input: text, max_output_tokens: 1 }],
        ['/v1/messages', { max_tokens: 1, ...chat(text) }],
        ['/v1/messages/count_tokens', chat(text)],
        ['/generate/', { prompts: [text], max_tokens: 1 }],
        ['/tokenize', { prompt: text }]
      ] as const
    ) {
      tokenizer.here = tokenizer.there = 0
      const reply = await call(url + path, body)
      t.equal(reply.status, 200, `${path} ${reply.text.slice(0, 200)}`)
      t.equal(tokenizer.here > 0, length === 10, `${path} with ${length} characters here`)
      t.equal(tokenizer.there > 0, length > 10, `${path} with ${length} characters there`)
    }
  }
})

t.test('a batch is counted before its texts are read', async t => {
  const { url, tokenizer } = await app(t)
  const nine = Array<string>(9).fill('a')
  for (
    const [path, body] of [
      ['/generate', { text: nine }],
      ['/generate', { text: ['a', 'a', 'a'], sampling_params: { n: 3 } }],
      ['/generate', { text: 'a', sampling_params: { n: 9 } }],
      ['/generate', { text: ['a', 'a'], sampling_params: [{ n: 1 }, { n: 9 }] }],
      ['/v1/completions', { prompt: nine }],
      ['/v1/completions', { prompt: 'a', n: 9 }],
      ['/v1/chat/completions', { ...chat('a'), n: 9 }],
      ['/generate/', { prompts: nine }],
      ['/generate/', { prompts: ['a'], generation_kwargs: { n: 9 } }],
      ['/chat/', { messages: nine.map(text => [{ role: 'user', content: text }]) }]
    ] as const
  ) {
    tokenizer.here = 0
    const { status, text } = await call(url + path, body)
    t.equal(status, 400, path)
    t.match(text, /at most 8 samples in one request/, path)
    t.equal(tokenizer.here, 0, `${path} reads nothing`)
  }
})

t.test('texts of bad words have a bound together', async t => {
  const { url, tokenizer } = await app(t)
  const words = Array<string>(17).fill('a'.repeat(1000))
  const { status, text } = await call(`${url}/inference/v1/generate`, {
    token_ids: [65],
    sampling_params: { max_tokens: 1, bad_words: words }
  })
  t.equal(status, 400)
  t.match(text, /bad_words: expected at most 16384 characters together, got 17000/)
  t.equal(tokenizer.here, 0)
})

t.test('many ids become the same text in slices as at once', async t => {
  const { url } = await app(t)
  const tokens = [...Buffer.from('aé€\u{10348}'.repeat(2000)), 2]
  const { json } = await call(`${url}/detokenize`, { tokens })
  t.equal(json.text, 'aé€\u{10348}'.repeat(2000))
  t.equal(json.prompt, new ByteTokenizer().decode(tokens))
  const { json: skipped } = await call(`${url}/detokenize`, { tokens: [tokens, tokens], skip_special_tokens: true })
  t.same(skipped.text, [json.text, json.text])
})

t.test('stop texts have a bound together', async t => {
  const { url } = await app(t)
  const stop = Array<string>(66).fill('s'.repeat(1000))
  const messages = [{ role: 'user', content: 'a' }]
  for (
    const [path, body] of [
      ['/generate', { text: 'a', sampling_params: { stop } }],
      ['/generate', { text: 'a', sampling_params: { stop_regex: stop } }],
      ['/v1/completions', { prompt: 'a', stop }],
      ['/v1/chat/completions', { messages, stop }],
      ['/v1/messages', { messages, max_tokens: 1, stop_sequences: stop }],
      ['/inference/v1/generate', { token_ids: [65], sampling_params: { stop } }]
    ] as const
  ) {
    const { status, text } = await call(url + path, body)
    t.equal(status, 400, path)
    t.match(text, /must have at most 65536 characters together, got 66000/, path)
  }
})

t.test('a special token is looked for in the stop texts once, for all samples', async t => {
  let searches = 0
  const tokenizer = new ByteTokenizer()
  const { idToText } = tokenizer
  tokenizer.idToText = id => {
    if (id === 2) searches++
    return idToText.call(tokenizer, id)
  }
  const engine = new FakeEngine()
  const generate = engine.generate.bind(engine)
  engine.generate = async function* (request) {
    for await (const event of generate(request)) yield { ...event, tokens: event.tokens.map(() => 2) }
  }
  const { url } = await routeApp(t, { engine, tokenizer })
  const sampling = { n: 4, max_new_tokens: 10, ignore_eos: true, stop: ['never'] }
  const { status } = await call(`${url}/generate`, { text: 'a', sampling_params: sampling })
  t.equal(status, 200)
  t.equal(searches, 1)
})
