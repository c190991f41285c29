import t from 'tap'
import { call, routeApp } from '../../helpers/route-app.ts'

const CALL = 'Ok <tool_call><function=f><parameter=n>\n3\n</parameter></function></tool_call>'
const tools = [{ type: 'function', function: { name: 'f', parameters: { properties: { n: { type: 'integer' } } } } }]

t.test('calls in a text are read in the named format, or in the one of the server', async t => {
  const { url } = await routeApp(t, { toolCallParser: 'hermes' })
  const parse = async (body: object) => (await call(`${url}/parse_function_call`, body)).json
  t.same(await parse({ text: CALL, tools, tool_call_parser: 'qwen3_coder' }), {
    normal_text: 'Ok',
    calls: [{ tool_index: 0, name: 'f', parameters: '{"n": 3}' }]
  })
  t.same(await parse({ text: CALL }), { normal_text: CALL, calls: [] })
})

t.test('reasoning in a text is told apart', async t => {
  const { url } = await routeApp(t, { reasoningParser: 'qwen3' })
  const separate = async (body: object) => (await call(`${url}/separate_reasoning`, body)).json
  t.same(await separate({ text: 'a</think>b', reasoning_parser: 'deepseek-r1' }), { text: 'b', reasoning_text: 'a' })
  t.same(await separate({ text: 'a</think>b' }), { text: 'a</think>b', reasoning_text: '' })
})

t.test('unknown and missing names are refused with the field', async t => {
  const { url } = await routeApp(t)
  const cases: [string, object, RegExp][] = [
    ['parse_function_call', { text: '', tool_call_parser: 'x' }, /^tool_call_parser: expected qwen, .*; got "x"$/],
    ['parse_function_call', { text: '' }, /^tool_call_parser: is required/],
    ['parse_function_call', { text: '', tools: [1], tool_call_parser: 'glm' }, /^tools\[0\]: expected/],
    ['separate_reasoning', { text: '', reasoning_parser: 'x' }, /^reasoning_parser: expected qwen3, .*; got "x"$/],
    ['separate_reasoning', { text: '', reasoning_parser: 'qwen3', return_blocks: true }, /^return_blocks: /]
  ]
  for (const [path, body, message] of cases) {
    const { status, json } = await call(`${url}/${path}`, body)
    t.equal(status, 400)
    t.match(json.error.message, message)
  }
})
