import t from 'tap'
import type { Test } from 'tap'
import { TemplateSpy } from '../../helpers/byte-tokenizer.ts'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import { call, routeApp } from '../../helpers/route-app.ts'

const tools = [{ type: 'function', name: 'add', parameters: { properties: { a: { type: 'integer' } } }, strict: true }]
const CALL = '<think>é?</think>See.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

async function replying (t: Test, text: string) {
  const engine = new FakeEngine()
  engine.script = [...Buffer.from(text), 2]
  const tokenizer = new TemplateSpy()
  const app = await routeApp(t, { engine, tokenizer, toolCallParser: 'qwen25', reasoningParser: 'qwen3' })
  return { ...app, tokenizer }
}

function events (text: string): any[] {
  return text.split('\n\n').filter(frame => frame !== '').map(frame => {
    const [, name, data] = /^event: (.*)\ndata: (.*)$/.exec(frame)!
    const event = JSON.parse(data!)
    if (event.type !== name) throw new Error(`${name} has an event of type ${event.type}`)
    return event
  })
}

/** Items without their random ids. */
function plain (output: any[]): object[] {
  return output.map(({ id: _, call_id: __, ...item }) => item)
}

t.test('a response has items of reasoning, text and calls', async t => {
  const { url } = await replying(t, CALL)
  const { status, json } = await call(`${url}/v1/responses`, { model: 'x', input: 'hi', tools, metadata: { a: 'b' } })
  t.equal(status, 200)
  const [reasoning, message, use] = json.output
  t.match(reasoning, { type: 'reasoning', id: /^rs_/, content: [{ type: 'reasoning_text', text: 'é?' }] })
  t.match(message, {
    type: 'message',
    id: /^msg_/,
    role: 'assistant',
    content: [{ type: 'output_text', text: /^See/ }]
  })
  for (const item of json.output) t.equal(item.status, 'completed')
  t.match(use, { type: 'function_call', id: /^fc_/, call_id: /^call_/, name: 'add', arguments: '{"a": 1}' })
  t.match(json, {
    id: /^resp_/,
    object: 'response',
    status: 'completed',
    store: false,
    incomplete_details: null,
    metadata: { a: 'b', weight_version: 'default' },
    usage: { input_tokens: 'user:hi\nassistant:'.length, output_tokens: Buffer.byteLength(CALL) + 1 }
  })
})

t.test('a stream builds the same items, numbers its events and ends with the response', async t => {
  for (const tokensPerEvent of [1, 7, 500]) {
    const { url, engine } = await replying(t, CALL)
    engine.tokensPerEvent = tokensPerEvent
    const whole = (await call(`${url}/v1/responses`, { input: 'hi', tools })).json
    const { text } = await call(`${url}/v1/responses`, { input: 'hi', tools, stream: true })
    const all = events(text)
    t.same(all.map(event => event.sequence_number), all.map((_, i) => i))
    t.same([all[0].type, all[1].type, all.at(-1).type], [
      'response.created',
      'response.in_progress',
      'response.completed'
    ])
    const { response } = all.at(-1)
    t.same(plain(response.output), plain(whole.output))
    const done = all.filter(({ type }) => type === 'response.output_item.done')
    t.same(done.map(({ item }) => item), response.output)
    t.same(done.map(event => event.output_index), [0, 1, 2])
    for (const [kind, index] of [['reasoning_text', 0], ['output_text', 1], ['function_call_arguments', 2]] as const) {
      const own = all.filter(({ type }) => type.startsWith(`response.${kind}.`))
      const end = own.at(-1)
      t.equal(end.type, `response.${kind}.done`)
      t.equal(own.slice(0, -1).map(({ delta }) => delta).join(''), end.text ?? end.arguments)
      t.same(new Set(own.map(event => event.item_id)), new Set([response.output[index].id]))
    }
  }
})

t.test('items of a conversation become messages of the template, in their order', async t => {
  const { url, tokenizer } = await replying(t, 'ok')
  const { status, text } = await call(`${url}/v1/responses`, {
    instructions: 'Be',
    reasoning: { effort: 'none' },
    tools,
    input: [
      { role: 'developer', content: 'brief' },
      { role: 'user', content: [{ type: 'input_text', text: 'q' }] },
      { type: 'reasoning', summary: [], content: [{ type: 'reasoning_text', text: 'hm' }] },
      { type: 'message', role: 'assistant', content: [{ type: 'output_text', text: 'a', annotations: [] }] },
      { type: 'function_call', call_id: 'c1', name: 'add', arguments: '{"a":2}' },
      { type: 'function_call', call_id: 'c2', name: 'add', arguments: '{"a":3}' },
      { type: 'function_call_output', call_id: 'c1', output: '3' },
      { type: 'function_call_output', call_id: 'c2', output: [{ type: 'input_text', text: '4' }] }
    ]
  })
  t.equal(status, 200, text)
  const { messages, options } = tokenizer.seen[0]!
  const use = (id: string, args: string): object => ({
    id,
    type: 'function',
    function: { name: 'add', arguments: args }
  })
  t.same(messages, [
    { role: 'system', content: 'Be\n\nbrief' },
    { role: 'user', content: 'q' },
    {
      role: 'assistant',
      content: 'a',
      reasoning_content: 'hm',
      tool_calls: [use('c1', '{"a":2}'), use('c2', '{"a":3}')]
    },
    { role: 'tool', tool_call_id: 'c1', content: '3' },
    { role: 'tool', tool_call_id: 'c2', content: '4' }
  ])
  t.same(options.tools, [{ type: 'function', function: { name: 'add', parameters: tools[0]!.parameters } }])
  t.match(options.kwargs, { reasoning_effort: 'none', enable_thinking: false })
})

t.test('a reply at its limit is incomplete', async t => {
  const { url } = await replying(t, 'one two')
  const { json } = await call(`${url}/v1/responses`, { input: 'hi', max_output_tokens: 3 })
  t.match(json, {
    status: 'incomplete',
    incomplete_details: { reason: 'max_output_tokens' },
    output: [{ content: [{ text: 'one' }] }]
  })
  const { text } = await call(`${url}/v1/responses`, { input: 'hi', max_output_tokens: 3, stream: true })
  t.equal(events(text).at(-1).type, 'response.incomplete')
})

t.test('stored state and unknown items are refused by name, and reach no engine', async t => {
  const { url, engine } = await routeApp(t)
  const cases: [object, RegExp, string][] = [
    [{}, /is required/, 'input'],
    [{ input: 'a', previous_response_id: 'r' }, /send the whole conversation as input/, 'previous_response_id'],
    [{ input: 'a', conversation: 'c' }, /send the whole conversation/, 'conversation'],
    [{ input: 'a', background: true }, /in the background/, 'background'],
    [{ input: 'a', tools: [{ type: 'web_search' }] }, /web_search" is not supported/, 'tools[0]'],
    [{ input: 'a', tools }, /--tool-call-parser/, 'tools'],
    [{ input: [{ type: 'item_reference', id: 'x' }] }, /item_reference" is not supported/, 'input[0]'],
    [
      { input: [{ role: 'user', content: [{ type: 'input_image' }] }] },
      /input_image" is not supported/,
      'input[0].content[0]'
    ],
    [{ input: [{ role: 'robot', content: 'x' }] }, /expected user, assistant/, 'input[0].role']
  ]
  for (const [body, message, param] of cases) {
    const { status, json } = await call(`${url}/v1/responses`, body)
    t.equal(status, 400)
    t.match(json.error, { type: 'invalid_request_error', message, param })
  }
  t.equal(engine.requests.length, 0)
})
