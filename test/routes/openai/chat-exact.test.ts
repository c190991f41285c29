import t from 'tap'
import type { ChatMessage, ChatTemplateOptions } from '../../../src/text/tokenizer.ts'
import { ByteTokenizer } from '../../helpers/byte-tokenizer.ts'
import { call, frames, routeApp } from '../../helpers/route-app.ts'

// Turns whose prompts hold exactly the tokens that were generated before.

const EOS = 2

/** A template that ends the assistant's messages with the eos token, and shows tools. */
class TurnTokenizer extends ByteTokenizer {
  override applyChatTemplate (messages: readonly ChatMessage[], options: ChatTemplateOptions = {}): string {
    const ended = messages.map(message =>
      message.role === 'assistant' ? { ...message, content: `${String(message.content)}\u0002` } : message
    )
    const tools = options.tools == null ? '' : `tools:${JSON.stringify(options.tools)}\n`
    return tools + super.applyChatTemplate(ended, options)
  }
}

const chat = '/v1/chat/completions'
const ids = (text: string): number[] => [...Buffer.from(text)]
const textOf = (list: ArrayLike<number>): string => Buffer.from(Array.from(list)).toString()

t.test("input_ids are the prompt, and meta_info has the reply's ids, as miles' session server reads them", async t => {
  const { url, engine } = await routeApp(t)
  // The body of an agent with the fields that miles adds.
  const { status, json } = await call(url + chat, {
    model: 'default',
    messages: [{ role: 'user', content: 'not rendered' }],
    temperature: 1,
    max_tokens: 5,
    input_ids: ids('abcdef'),
    logprobs: true,
    return_meta_info: true,
    no_stop_trim: false,
    lora_path: null,
    stream: false
  })
  t.equal(status, 200)
  t.equal(textOf(engine.requests[0]!.inputIds), 'abcdef')
  const [{ message, meta_info: info, finish_reason: reason }] = json.choices
  t.equal(reason, 'length')
  t.equal(message.content, textOf(info.output_token_logprobs.map(([, id]: number[]) => id)))
  t.equal(info.output_token_logprobs.length, info.completion_tokens)
  t.equal(info.completion_tokens, 5)
  t.match(info, { prompt_tokens: 6, weight_version: 'default', finish_reason: { type: 'length' } })
  for (const [logprob] of info.output_token_logprobs) t.type(logprob, 'number')
})

t.test('an empty reply has empty content, not null', async t => {
  const { url } = await routeApp(t)
  const { json } = await call(url + chat, { messages: [{ role: 'user', content: 'a' }], max_tokens: 0 })
  t.equal(json.choices[0].message.content, '')
})

t.test('meta_info is absent unless requested, without logprobs unless requested, and refused in a stream', async t => {
  const { url, engine } = await routeApp(t)
  const body = { messages: [{ role: 'user', content: 'a' }], max_tokens: 2 }
  t.notOk('meta_info' in (await call(url + chat, body)).json.choices[0])
  const { json } = await call(url + chat, { ...body, return_meta_info: true })
  t.equal(json.choices[0].meta_info.completion_tokens, 2)
  t.notOk('output_token_logprobs' in json.choices[0].meta_info)
  const refused = await call(url + chat, { ...body, return_meta_info: true, stream: true })
  t.match(refused, { status: 400, json: { error: { param: 'return_meta_info', message: /send "stream": false/ } } })
  const wrong = await call(url + chat, { ...body, input_ids: [5, 300] })
  t.match(wrong, {
    status: 400,
    json: { error: { param: 'input_ids[1]', message: /expected a token id from 0 to 299/ } }
  })
  t.equal(engine.requests.length, 2)
})

t.test('echo begins the reply with the text that it continues, in one piece and in a stream', async t => {
  const { url } = await routeApp(t)
  const messages = [{ role: 'user', content: 'a' }, { role: 'assistant', content: 'Once' }]
  const body = { messages, max_tokens: 2, add_generation_prompt: false, echo: true }
  const { json: { choices: [{ message }] } } = await call(url + chat, body)
  t.match(message.content, /^Once.{2}$/s)
  const events = frames((await call(url + chat, { ...body, stream: true })).text)
  const joined = events.map(event => event.choices?.[0]?.delta.content ?? '').join('')
  t.equal(joined, message.content)
  const other = await call(url + chat, { ...body, messages: messages.slice(0, 1), add_generation_prompt: true })
  t.equal(other.json.choices[0].message.content.length, 2, "the last message is not the assistant's")
})

t.test('return_prompt_text sends the text of the prompt', async t => {
  const { url } = await routeApp(t)
  const body = { messages: [{ role: 'user', content: 'a' }], max_tokens: 1, return_prompt_text: true }
  t.equal((await call(url + chat, body)).json.prompt_text, 'user:a\nassistant:')
  t.equal(frames((await call(url + chat, { ...body, stream: true })).text)[0].prompt_text, 'user:a\nassistant:')
})

t.test('a required prefix stands for the rendered messages up to the last assistant message', async t => {
  const { url, engine } = await routeApp(t, { tokenizer: new TurnTokenizer() })
  const messages = [
    { role: 'user', content: 'q' },
    { role: 'assistant', content: 'tidied' },
    { role: 'user', content: 'next' }
  ]
  const after = '\u0002\nuser:next\nassistant:'
  const prompt = async (fields: object): Promise<string> => {
    const reply = await call(url + chat, { messages, max_tokens: 1, ...fields })
    t.equal(reply.status, 200, reply.text)
    const tokens = (await call(`${url}/tokenize`, { messages, ...fields })).json.tokens
    const used = engine.requests.at(-1)!.inputIds
    t.same(tokens, [...used], '/tokenize returns the same ids')
    return textOf(used)
  }
  t.equal(await prompt({}), `user:q\nassistant:tidied${after}`)
  t.equal(await prompt({ required_prefix_token_ids: ids('user:q\nassistant:RAW') }), `user:q\nassistant:RAW${after}`)
  t.equal(
    await prompt({ required_prefix_token_ids: [...ids('user:q\nassistant:RAW'), EOS] }),
    `user:q\nassistant:RAW${after}`,
    'an eos that the model wrote is not doubled'
  )
  const own = [messages[0], {
    ...messages[1],
    prompt_token_ids: ids('user:q\nassistant:'),
    generation_token_ids: ids('Raw!'),
    generation_log_probs: [-1, -1, -1, -1]
  }, messages[2]]
  t.equal(await prompt({ messages: own }), `user:q\nassistant:Raw!${after}`)
})

t.test('a prefix is refused where the template has no eos token', async t => {
  const { url } = await routeApp(t)
  const { status, json } = await call(url + chat, {
    messages: [{ role: 'user', content: 'a' }],
    required_prefix_token_ids: [5]
  })
  t.equal(status, 400)
  t.match(json.error, { param: 'required_prefix_token_ids', message: /does not end the assistant's messages/ })
})

t.test('/tokenize renders tools, and its text and ids agree with chat', async t => {
  const { url, engine } = await routeApp(t, { tokenizer: new TurnTokenizer() })
  const fields = {
    messages: [{ role: 'user', content: 'a' }],
    tools: [{ type: 'function', function: { name: 'f', parameters: { type: 'object' } } }],
    chat_template_kwargs: { shout: true },
    tool_choice: 'none'
  }
  const { json } = await call(`${url}/tokenize`, { ...fields, return_token_strs: true })
  t.match(textOf(json.tokens), /^tools:.*"name":"f".*user:a\n!assistant:$/s)
  t.same(json.token_strs, json.tokens.map((id: number) => String.fromCharCode(id)))
  t.equal(json.count, json.tokens.length)
  await call(url + chat, { ...fields, max_tokens: 1 })
  t.same([...engine.requests[0]!.inputIds], json.tokens)
  const refused = await call(`${url}/tokenize`, { ...fields, chat_template: 'x' })
  t.match(refused, { status: 400, json: { param: 'chat_template', error: { code: 'UNSUPPORTED' } } })
})

t.test('documents and reasoning_effort are variables of the template', async t => {
  const seen: object[] = []
  class Spy extends ByteTokenizer {
    override applyChatTemplate (messages: readonly ChatMessage[], options: ChatTemplateOptions = {}): string {
      seen.push(options.kwargs!)
      return super.applyChatTemplate(messages, options)
    }
  }
  const { url } = await routeApp(t, { tokenizer: new Spy() })
  const body = { messages: [{ role: 'user', content: 'a' }], max_tokens: 1 }
  for (
    const fields of [
      { documents: [{ text: 'd' }], reasoning_effort: 'low' },
      { reasoning_effort: 'none' },
      { reasoning_effort: 'none', chat_template_kwargs: { enable_thinking: true } }
    ]
  ) t.equal((await call(url + chat, { ...body, ...fields })).status, 200)
  t.same(seen, [
    { documents: [{ text: 'd' }], reasoning_effort: 'low' },
    { reasoning_effort: 'none', enable_thinking: false, thinking: false },
    { reasoning_effort: 'none', enable_thinking: true, thinking: false }
  ])
})

t.test("prime-rl's /v1/chat/completions/tokens is a chat whose prompt is tokens", async t => {
  const { url, engine } = await routeApp(t)
  const body = { messages: [{ role: 'user', content: 'not rendered' }], max_tokens: 3, return_token_ids: true }
  const { status, json } = await call(`${url}${chat}/tokens`, { ...body, tokens: ids('abcdef'), logprobs: true })
  t.equal(status, 200)
  t.equal(textOf(engine.requests[0]!.inputIds), 'abcdef')
  t.match(json, {
    object: 'chat.completion',
    prompt_token_ids: ids('abcdef'),
    choices: [{ token_ids: ids('abc'), message: { content: 'abc' }, logprobs: { content: [{}, {}, {}] } }]
  })
  const stream = await call(`${url}${chat}/tokens`, { ...body, tokens: ids('xyz'), stream: true })
  const text = frames(stream.text).flatMap(({ choices }: any) => choices?.[0]?.delta.content ?? []).join('')
  t.equal(text, 'xyz')
  for (
    const [tokens, message] of [[undefined, /tokens/], [[], /tokens/], [
      [5, 300],
      /^tokens\[1\] is 300; expected a token id/
    ]] as const
  ) {
    const refused = await call(`${url}${chat}/tokens`, { ...body, tokens })
    t.match(refused, { status: 400, json: { error: { message } } })
  }
})
