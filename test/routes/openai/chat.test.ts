import t from 'tap'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import { call, frames, routeApp, until } from '../../helpers/route-app.ts'

const messages = [{ role: 'user', content: 'hi' }]
// The text that the test tokenizer's template makes of the messages.
const PROMPT = 'user:hi\nassistant:'

t.test("a chat completion has OpenAI's form", async t => {
  const { url } = await routeApp(t)
  const { status, json } = await call(`${url}/v1/chat/completions`, {
    model: 'x',
    messages,
    max_tokens: 4,
    return_token_ids: true
  })
  t.equal(status, 200)
  const { id, created, ...rest } = json
  t.match(id, /^chatcmpl-/)
  t.same(rest, {
    object: 'chat.completion',
    model: 'fake',
    choices: [{
      index: 0,
      message: { role: 'assistant', content: 'user' },
      logprobs: null,
      finish_reason: 'length',
      matched_stop: null,
      token_ids: [...Buffer.from('user')]
    }],
    usage: {
      prompt_tokens: PROMPT.length,
      completion_tokens: 4,
      total_tokens: PROMPT.length + 4,
      prompt_tokens_details: { cached_tokens: PROMPT.length - 2 }
    },
    metadata: { weight_version: 'default' },
    prompt_token_ids: [...Buffer.from(PROMPT)]
  })
})

t.test('max_completion_tokens wins over max_tokens, and without either the context is the limit', async t => {
  const { url } = await routeApp(t)
  t.equal(
    (await call(`${url}/v1/chat/completions`, { messages, max_tokens: 4, max_completion_tokens: 2 }))
      .json
      .usage
      .completion_tokens,
    2
  )
  t.equal((await call(`${url}/v1/chat/completions`, { messages })).json.usage.total_tokens, 512)
})

t.test('chat_template_kwargs reach the template as variables', async t => {
  const { url, engine } = await routeApp(t)
  await call(`${url}/v1/chat/completions`, {
    messages,
    max_tokens: 1,
    chat_template_kwargs: { shout: true },
    add_generation_prompt: false
  })
  t.equal(Buffer.from(engine.requests[0]!.inputIds).toString(), 'user:hi\n!')
})

t.test('logprobs have the chat form', async t => {
  const { url } = await routeApp(t)
  const [choice] =
    (await call(`${url}/v1/chat/completions`, { messages, max_tokens: 1, logprobs: true, top_logprobs: 2 }))
      .json
      .choices
  t.same(choice.logprobs, {
    content: [{
      token: 'u',
      logprob: -1.17,
      bytes: [117],
      top_logprobs: [{ token: 'u', logprob: -1.17, bytes: [117] }, { token: 'v', logprob: -1.18, bytes: [118] }]
    }]
  })
})

t.test('streams begin with the role and end with the reason, for each of n', async t => {
  const { url } = await routeApp(t)
  const all = frames(
    (await call(`${url}/v1/chat/completions`, {
      messages,
      n: 2,
      max_tokens: 4,
      logprobs: true,
      stream: true,
      return_token_ids: true,
      stream_options: { include_usage: true }
    }))
      .text
  )
  t.equal(all.at(-1), '[DONE]')
  t.match(all.at(-2), { choices: [], usage: { prompt_tokens: PROMPT.length, completion_tokens: 8 } })
  const chunks = all.slice(0, -2)
  t.ok(chunks.every(chunk => chunk.object === 'chat.completion.chunk' && chunk.usage === null))
  t.same(chunks[0].prompt_token_ids, [...Buffer.from(PROMPT)])
  for (const index of [0, 1]) {
    const own = chunks.map(chunk => chunk.choices[0]).filter(choice => choice.index === index)
    t.same(own[0].delta, { role: 'assistant', content: '' })
    t.equal(own.map(choice => choice.delta.content ?? '').join(''), 'user')
    t.equal(own.flatMap(choice => choice.logprobs?.content ?? []).map((token: any) => token.token).join(''), 'user')
    t.same(own.flatMap(choice => choice.token_ids ?? []), [...Buffer.from('user')])
    t.same(own.at(-1), { index, delta: {}, logprobs: null, finish_reason: 'length', matched_stop: null })
    t.ok(own.slice(0, -1).every(choice => choice.finish_reason === null))
  }
})

t.test('a character of several tokens arrives in one chunk', async t => {
  const { url } = await routeApp(t)
  const chunks = frames(
    (await call(`${url}/v1/chat/completions`, { messages: [{ role: '€', content: '' }], max_tokens: 4, stream: true }))
      .text
  )
    .slice(0, -1)
  const pieces = chunks.map(chunk => chunk.choices[0].delta.content ?? '').filter(Boolean)
  t.same(pieces, ['€', ':'])
})

t.test("errors have OpenAI's shape", async t => {
  const { url } = await routeApp(t)
  const cases: [object, RegExp, string][] = [
    [{}, /^messages: is required$/, 'messages'],
    [{ messages: [] }, /^messages: expected at least 1 item, got 0$/, 'messages'],
    [{ messages: [{ content: 'x' }] }, /^messages\[0\]\.role: is required$/, 'messages[0].role'],
    [{ messages: 'hi' }, /^messages: expected an array of objects, got "hi"$/, 'messages'],
    [{ messages, tools: [{ type: 'function' }] }, /^tools\[0\]: expected/, 'tools[0]'],
    [
      { messages, response_format: { type: 'json_schema' } },
      /^response_format.json_schema.schema: is missing/,
      'response_format.json_schema.schema'
    ],
    [{ messages, top_logprobs: 3 }, /^top_logprobs: needs "logprobs": true/, 'top_logprobs'],
    [{ messages, logprobs: 5 }, /^logprobs: expected true or false or null, got 5$/, 'logprobs'],
    [{ messages, chat_template: 'x' }, /^chat_template: /, 'chat_template'],
    [{ messages, n: 1000 }, /^n: expected at most 512 samples/, 'n']
  ]
  for (const [body, message, param] of cases) {
    const { status, json } = await call(`${url}/v1/chat/completions`, body)
    t.equal(status, 400)
    t.match(json.error, { message, param, type: 'invalid_request_error' })
  }
  t.equal(
    (await call(`${url}/v1/chat/completions`, {
      messages,
      tools: [],
      tool_choice: 'none',
      response_format: { type: 'text' },
      max_tokens: 1
    }))
      .status,
    200
  )
})

t.test("a stream that fails sends an error in OpenAI's shape", async t => {
  const engine = new FakeEngine({ stepMs: 2 })
  const { url } = await routeApp(t, { engine })
  const pending = call(`${url}/v1/chat/completions`, { messages, stream: true })
  await until(() => engine.stats.generationTokens > 3)
  engine.weights = { state: 'torn', tensors: ['x'], reason: 'a read failed' }
  const all = frames((await pending).text)
  t.same(all.slice(-2), [{
    error: { message: 'a read failed', type: 'unavailable_error', param: null, code: 'ENGINE_TORN' }
  }, '[DONE]'])
})

t.test('without a tokenizer chat is refused with the reason', async t => {
  const { url } = await routeApp(t, { tokenizer: null })
  t.match((await call(`${url}/v1/chat/completions`, { messages })).json.error, {
    message: /no tokenizer/,
    code: 'UNSUPPORTED'
  })
})
