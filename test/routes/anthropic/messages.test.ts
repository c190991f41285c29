import t from 'tap'
import type { Test } from 'tap'
import { TemplateSpy } from '../../helpers/byte-tokenizer.ts'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import { call, routeApp } from '../../helpers/route-app.ts'

const messages = [{ role: 'user', content: 'hi' }]
const tools = [{
  name: 'add',
  description: 'Adds',
  input_schema: { type: 'object', properties: { a: { type: 'integer' } } }
}]
const CALL = '<think>é?</think>See.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

async function replying (t: Test, text: string) {
  const engine = new FakeEngine()
  engine.script = [...Buffer.from(text), 2]
  const tokenizer = new TemplateSpy()
  return {
    ...await routeApp(t, { engine, tokenizer, toolCallParser: 'qwen25', reasoningParser: 'qwen3' }),
    tokenizer
  }
}

/** The names and objects of a stream's frames. */
function events (text: string): { name: string, data: any }[] {
  return text.split('\n\n').filter(frame => frame !== '').map(frame => {
    const [, name, data] = /^event: (.*)\ndata: (.*)$/.exec(frame)!
    return { name: name!, data: JSON.parse(data!) }
  })
}

t.test('a reply has blocks of thinking, text and calls', async t => {
  const { url } = await replying(t, CALL)
  const { status, json } = await call(`${url}/v1/messages`, { model: 'x', messages, tools, max_tokens: 400 })
  t.equal(status, 200)
  const { id, content: [thinking, text, use], ...rest } = json
  t.match(id, /^msg_[0-9a-f]{32}$/)
  t.same(thinking, { type: 'thinking', thinking: 'é?', signature: '' })
  t.match(text, { type: 'text', text: /^See\.\s*$/ })
  t.match(use, { type: 'tool_use', id: /^toolu_[0-9a-f]{24}$/, name: 'add', input: { a: 1 } })
  t.match(rest, { type: 'message', role: 'assistant', stop_reason: 'tool_use', stop_sequence: null })
  t.equal(rest.usage.input_tokens + rest.usage.cache_read_input_tokens, 'user:hi\nassistant:'.length)
  t.equal(rest.usage.output_tokens, Buffer.byteLength(CALL) + 1)
})

t.test('a stream has the same blocks, with their events in order, whatever an event of the engine holds', async t => {
  for (const tokensPerEvent of [1, 7, 500]) {
    const { url, engine } = await replying(t, CALL)
    engine.tokensPerEvent = tokensPerEvent
    const { text } = await call(`${url}/v1/messages`, { messages, tools, max_tokens: 400, stream: true })
    const all = events(text)
    for (const { name, data } of all) t.equal(name, data.type)
    const kinds = all.map(({ name }) => name).filter((name, i, names) => name !== names[i - 1])
    const block = ['content_block_start', 'content_block_delta', 'content_block_stop']
    t.same(kinds, ['message_start', ...block, ...block, ...block, 'message_delta', 'message_stop'])
    const deltas = (index: number, key: string): string =>
      all.map(({ data }) => data.index === index ? data.delta?.[key] ?? '' : '').join('')
    t.equal(deltas(0, 'thinking'), 'é?')
    t.match(deltas(1, 'text'), /^See\.\s*$/)
    t.same(JSON.parse(deltas(2, 'partial_json')), { a: 1 })
    t.match(all.at(-2)!.data, { delta: { stop_reason: 'tool_use' }, usage: { output_tokens: CALL.length + 2 } })
    t.notMatch(text, /DONE/)
  }
})

t.test('blocks of a conversation become messages of the template, in their order', async t => {
  const { url, tokenizer, engine } = await replying(t, 'ok')
  const body = {
    system: [{ type: 'text', text: 'Be', cache_control: { type: 'ephemeral' } }, { type: 'text', text: 'brief' }],
    tools,
    tool_choice: { type: 'auto', disable_parallel_tool_use: true },
    thinking: { type: 'disabled' },
    chat_template_kwargs: { shout: true },
    messages: [
      { role: 'user', content: [{ type: 'text', text: 'q' }] },
      {
        role: 'assistant',
        content: [
          { type: 'thinking', thinking: 'hm', signature: 's' },
          { type: 'text', text: 'a' },
          { type: 'tool_use', id: 'toolu_1', name: 'add', input: { a: 2 } }
        ]
      },
      {
        role: 'user',
        content: [
          { type: 'tool_result', tool_use_id: 'toolu_1', content: [{ type: 'text', text: '3' }] },
          { type: 'text', text: 'and?' }
        ]
      }
    ]
  }
  const counted = await call(`${url}/v1/messages/count_tokens`, body)
  t.equal((await call(`${url}/v1/messages`, { ...body, max_tokens: 5 })).status, 200)
  t.same(counted.json, { input_tokens: engine.requests[0]!.inputIds.length }, 'the count is that of the same request')
  const { messages: seen, options } = tokenizer.seen.at(-1)!
  t.same(seen, [
    { role: 'system', content: 'Be\nbrief' },
    { role: 'user', content: 'q' },
    {
      role: 'assistant',
      content: 'a',
      reasoning_content: 'hm',
      tool_calls: [{ id: 'toolu_1', type: 'function', function: { name: 'add', arguments: '{"a":2}' } }]
    },
    { role: 'tool', tool_call_id: 'toolu_1', content: '3' },
    { role: 'user', content: 'and?' }
  ])
  t.same(options.tools, [{
    type: 'function',
    function: { name: 'add', description: 'Adds', parameters: tools[0]!.input_schema }
  }])
  t.same(options.kwargs, { enable_thinking: false, thinking: false, shout: true })
})

t.test('stop reasons name the limit, the sequence and the end', async t => {
  const { url } = await replying(t, 'one two')
  const reason = async (fields: object): Promise<unknown[]> => {
    const { json } = await call(`${url}/v1/messages`, { messages, max_tokens: 50, ...fields })
    return [json.stop_reason, json.stop_sequence, json.content[0].text]
  }
  t.same(await reason({}), ['end_turn', null, 'one two'])
  t.same(await reason({ max_tokens: 3 }), ['max_tokens', null, 'one'])
  t.same(await reason({ stop_sequences: [' tw'] }), ['stop_sequence', ' tw', 'one'])
})

t.test('an empty reply has one empty block, in one piece and in a stream', async t => {
  const { url } = await replying(t, '')
  const body = { messages, max_tokens: 5 }
  t.same((await call(`${url}/v1/messages`, body)).json.content, [{ type: 'text', text: '' }])
  const names = events((await call(`${url}/v1/messages`, { ...body, stream: true })).text).map(({ name }) => name)
  t.same(names, ['message_start', 'content_block_start', 'content_block_stop', 'message_delta', 'message_stop'])
})

t.test("what cannot be followed is refused in Anthropic's form, and reaches no engine", async t => {
  const { url, engine } = await routeApp(t)
  const image = { role: 'user', content: [{ type: 'image', source: {} }] }
  const cases: [object, RegExp, string][] = [
    [{ messages, max_tokens: 0 }, /expected a number >= 1/, 'max_tokens'],
    [{ messages }, /is required/, 'max_tokens'],
    [{ messages: [image], max_tokens: 5 }, /type "image" is not supported/, 'messages[0].content[0]'],
    [{ messages: [{ role: 'tool', content: 'x' }], max_tokens: 5 }, /expected user or assistant/, 'messages[0].role'],
    [{ messages, max_tokens: 5, tools }, /--tool-call-parser/, 'tools'],
    [{ messages, max_tokens: 5, tools: [{ type: 'bash_20250124', name: 'bash' }] }, /runs at the server/, 'tools[0]'],
    [{ messages, max_tokens: 5, tool_choice: { type: 'tool' } }, /is required/, 'tool_choice.name'],
    [{ messages, max_tokens: 5, context_management: { edits: [{ type: 'x' }] } }, /editing/, 'context_management']
  ]
  for (const [body, message, param] of cases) {
    const { status, json } = await call(`${url}/v1/messages`, body)
    t.equal(status, 400)
    t.match(json, { type: 'error', error: { type: 'invalid_request_error', message, param } })
  }
  t.equal(engine.requests.length, 0)
})

t.test('a request may be bound to a weight version', async t => {
  const { url } = await routeApp(t, { versionWaitMs: 10 })
  const forms = [{ weight_version: { min_version: 7 } }, { min_weight_version: 7 }, { exact_weight_version: 7 }]
  for (const version of forms) {
    const { status, json } = await call(`${url}/v1/messages`, { messages, max_tokens: 5, ...version })
    t.equal(status, 409)
    t.match(json, { type: 'error', error: { code: 'WEIGHT_VERSION' } })
  }
})

t.test('the key may come in x-api-key', async t => {
  const { url } = await routeApp(t, { apiKey: 'secret' })
  const status = async (headers: Record<string, string>): Promise<number> =>
    (await call(`${url}/v1/messages`, undefined, {
      method: 'POST',
      headers: { 'content-type': 'application/json', ...headers },
      body: JSON.stringify({ messages, max_tokens: 1 })
    }))
      .status
  t.equal(await status({ 'x-api-key': 'secret' }), 200)
  t.equal(await status({ authorization: 'Bearer secret' }), 200)
  t.equal(await status({ 'x-api-key': 'other' }), 403)
  t.equal(await status({}), 403)
})
