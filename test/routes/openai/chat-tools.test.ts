import t from 'tap'
import type { Test } from 'tap'
import { ByteTokenizer } from '../../helpers/byte-tokenizer.ts'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import { call, frames, routeApp } from '../../helpers/route-app.ts'

const messages = [{ role: 'user', content: 'hi' }]
const tools = [
  { type: 'function', function: { name: 'add', parameters: { properties: { a: { type: 'integer' } } } } },
  { type: 'function', function: { name: 'now' } }
]
const CALLS = '<think>é?</think>\nLet me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n' +
  '<tool_call>\n{"name": "now", "arguments": {"zone": "ü"}}\n</tool_call>'

/** A server whose model replies with a text and ends. */
async function replying (t: Test, text: string, options: Parameters<typeof routeApp>[1] = {}) {
  const engine = new FakeEngine()
  engine.script = [...Buffer.from(text), 2]
  return await routeApp(t, { engine, toolCallParser: 'qwen25', reasoningParser: 'qwen3', ...options })
}

/** The message and the last reason of a stream. */
function joined (all: any[]): { message: any, reason: string, deltas: any[] } {
  const choices = all.filter(frame => typeof frame === 'object').flatMap(frame => frame.choices)
  const deltas = choices.map(choice => choice.delta)
  const text = (key: string): string => deltas.map(delta => delta[key] ?? '').join('')
  const calls = deltas.flatMap(delta => delta.tool_calls ?? [])
  return {
    message: {
      content: text('content'),
      reasoning: text('reasoning'),
      reasoning_content: text('reasoning_content'),
      calls: calls.map(({ index, function: { name, arguments: args } }) => [index, name, args])
    },
    reason: choices.at(-1).finish_reason,
    deltas
  }
}

t.test('a reply has content, reasoning under both names, and calls', async t => {
  const { url } = await replying(t, CALLS)
  const { json: { choices: [{ message, finish_reason: reason }] } } = await call(`${url}/v1/chat/completions`, {
    messages,
    tools
  })
  t.equal(reason, 'tool_calls')
  const { tool_calls: [first, second], ...rest } = message
  t.same(rest, { role: 'assistant', content: '\nLet me see.', reasoning: 'é?', reasoning_content: 'é?' })
  t.match(first, { id: /^call_[0-9a-f]{24}$/, type: 'function', function: { name: 'add', arguments: '{"a": 1}' } })
  t.same(second.function, { name: 'now', arguments: '{"zone": "ü"}' })
  t.not(first.id, second.id)
})

t.test('a stream has the same parts, whatever an event holds', async t => {
  for (const tokensPerEvent of [1, 7, 500]) {
    const { url, engine } = await replying(t, CALLS)
    engine.tokensPerEvent = tokensPerEvent
    const { text } = await call(`${url}/v1/chat/completions`, { messages, tools, stream: true, return_token_ids: true })
    const all = frames(text)
    const { message, reason, deltas } = joined(all)
    t.same(message, {
      content: '\nLet me see.',
      reasoning: 'é?',
      reasoning_content: 'é?',
      calls: [[0, 'add', '{"a": 1}'], [1, 'now', '{"zone": "ü"}']]
    })
    t.equal(reason, 'tool_calls')
    t.equal(deltas.map(delta => delta.content ?? '').join(''), '\nLet me see.')
    t.same(
      all.filter(frame => typeof frame === 'object').flatMap(frame => frame.choices[0].token_ids ?? []),
      [...Buffer.from(CALLS), 2],
      'every token has its chunk'
    )
  }
})

t.test('logprobs of held text come with a chunk of their own', async t => {
  const { url } = await replying(t, CALLS)
  const all = frames((await call(`${url}/v1/chat/completions`, { messages, tools, stream: true, logprobs: true })).text)
  const logprobs = all
    .filter(frame => typeof frame === 'object')
    .flatMap(frame => frame.choices[0].logprobs?.content ?? [])
  t.equal(logprobs.length, Buffer.byteLength(CALLS) + 1)
})

t.test('fields choose what becomes of reasoning', async t => {
  const { url } = await replying(t, '<think>so</think>yes')
  const ask = async (body: object) =>
    (await call(`${url}/v1/chat/completions`, { messages, ...body })).json.choices[0].message
  t.same(await ask({}), { role: 'assistant', content: 'yes', reasoning: 'so', reasoning_content: 'so' })
  t.same(await ask({ separate_reasoning: false }), { role: 'assistant', content: '<think>so</think>yes' })
  t.same(await ask({ include_reasoning: false }), {
    role: 'assistant',
    content: 'yes',
    reasoning: null,
    reasoning_content: null
  })
  const held = frames(
    (await call(`${url}/v1/chat/completions`, { messages, stream: true, stream_reasoning: false })).text
  )
  t.same(joined(held).deltas.filter(delta => delta.reasoning), [{ reasoning: 'so', reasoning_content: 'so' }])
})

t.test('malformed calls stay in the content, and the reply ends as text does', async t => {
  const { url } = await replying(t, 'a <tool_call>{"name": }</tool_call>')
  const { json: { choices: [choice] } } = await call(`${url}/v1/chat/completions`, { messages, tools })
  t.equal(choice.message.content, 'a <tool_call>{"name": }</tool_call>')
  t.equal(choice.finish_reason, 'stop')
  t.notOk('tool_calls' in choice.message)
})

t.test('without parallel calls only the first is returned', async t => {
  const { url } = await replying(t, CALLS)
  const { json } = await call(`${url}/v1/chat/completions`, { messages, tools, parallel_tool_calls: false })
  t.same(json.choices[0].message.tool_calls.map((call: any) => call.function.name), ['add'])
})

t.test('tool_choice "none" leaves calls in the text, with and without a parser', async t => {
  for (const toolCallParser of ['hermes', undefined]) {
    const { url } = await replying(t, CALLS, { toolCallParser, reasoningParser: undefined })
    const { json } = await call(`${url}/v1/chat/completions`, { messages, tools, tool_choice: 'none' })
    t.same(json.choices[0].message, { role: 'assistant', content: CALLS })
  }
})

t.test('special tokens that the parsers read stay in the text, others are left out', async t => {
  class Tokenizer extends ByteTokenizer {
    override idToText (id: number): string {
      return id === 256 ? '<tool_call>' : super.idToText(id)
    }

    override detokenizer (options: Parameters<ByteTokenizer['detokenizer']>[0] = {}) {
      const inner = super.detokenizer({ ...options, skipSpecialTokens: true })
      return {
        push: (ids: ArrayLike<number>) =>
          Array.from(ids, id => id !== 256 ? inner.push([id]) : options.visible?.has(id) ? '<tool_call>' : '').join(''),
        flush: () => inner.flush()
      }
    }
  }
  const engine = new FakeEngine()
  engine.script = [256, ...Buffer.from('{"name": "now"}</tool_call>'), 2]
  const { url } = await routeApp(t, { engine, toolCallParser: 'hermes', tokenizer: new Tokenizer() })
  const ask = async (body: object) =>
    (await call(`${url}/v1/chat/completions`, { messages, ...body })).json.choices[0].message
  t.equal((await ask({ tools })).tool_calls[0].function.name, 'now')
  t.equal((await ask({})).content, '{"name": "now"}</tool_call>')
})

t.test('required and named choices constrain the reply to a list of calls', async t => {
  const list = '[{"name": "add", "parameters": {"a": 2}}]'
  const { url, engine } = await replying(t, list)
  const ask = async (body: object) =>
    (await call(`${url}/v1/chat/completions`, { messages, tools, ...body })).json.choices[0]
  const required = await ask({ tool_choice: 'required' })
  t.equal(required.finish_reason, 'tool_calls')
  t.same(required.message.tool_calls[0].function, { name: 'add', arguments: '{"a": 2}' })
  const named = await ask({ tool_choice: { type: 'function', function: { name: 'add' } } })
  t.equal(named.finish_reason, 'stop')
  t.equal(named.message.tool_calls.length, 1)
  const [both, one] = engine.requests.map(({ grammar }) => grammar) as { kind: string, schema: string }[]
  t.equal(both!.kind, 'json_schema')
  t.same(JSON.parse(both!.schema).items.anyOf.map((item: any) => item.properties.name.const), ['add', 'now'])
  t.match(JSON.parse(one!.schema), {
    maxItems: 1,
    items: { properties: { parameters: tools[0]!.function.parameters } }
  })
})

t.test('what cannot be followed is refused in words', async t => {
  const { url } = await replying(t, 'x')
  const bare = await replying(t, 'x', { toolCallParser: undefined })
  const cases: [string, object, RegExp, string][] = [
    [bare.url, { tools }, /^tools: "auto" tool choice requires --tool-call-parser to be set/, 'tools'],
    [url, { tools, tool_choice: 'any' }, /^tool_choice: expected "none", "auto", .*got "any"/, 'tool_choice'],
    [url, { tool_choice: 'required' }, /^tool_choice: needs tools/, 'tool_choice'],
    [
      url,
      { tools, tool_choice: { type: 'function', function: { name: 'sub' } } },
      /^tool_choice: no function is named "sub"; expected add, now/,
      'tool_choice'
    ],
    [url, { tools: [{ type: 'function' }] }, /^tools\[0\]: expected \{"type": "function"/, 'tools[0]']
  ]
  for (const [at, body, message, param] of cases) {
    const { status, json } = await call(`${at}/v1/chat/completions`, { messages, ...body })
    t.equal(status, 400)
    t.match(json.error, { message, param })
  }
  await t.rejects(routeApp(t, { toolCallParser: 'qwen9' }), { code: 'CONFIG' })
})
