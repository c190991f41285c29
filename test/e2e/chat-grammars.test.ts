import { Ajv2020 } from 'ajv/dist/2020.js'
import t from 'tap'
import { call, frames } from '../helpers/route-app.ts'
import { END_OF_THINK, THINK, tinyChat } from './tiny-chat.ts'

// Random weights: whatever the model prefers, what comes behind its reasoning follows the grammar.

const start = await tinyChat(t)
const url = await start({ reasoningParser: 'qwen3' })
const messages = [{ role: 'user', content: 'hi' }]
const schema = {
  type: 'object',
  properties: { name: { type: 'string', maxLength: 5 }, size: { type: 'integer', minimum: 0, maximum: 99 } },
  required: ['name', 'size'],
  additionalProperties: false
}
const format = { type: 'json_schema', json_schema: { name: 'thing', schema } }
const ajv = new Ajv2020()

interface Choice {
  message: { content: string, reasoning: string | null, tool_calls?: any[] }
  finish_reason: string
  token_ids: number[]
}

async function ask (body: object, at = url): Promise<Choice[]> {
  const { status, json } = await call(`${at}/v1/chat/completions`, {
    messages,
    max_tokens: 400,
    return_token_ids: true,
    // The model's end token ends no reasoning.
    logit_bias: { [END_OF_THINK]: 4, 2: -100 },
    ...body
  })
  t.equal(status, 200, JSON.stringify(json).slice(0, 300))
  return json.choices
}

const thinking = { chat_template_kwargs: { thinking: true } }

t.test('a grammar begins behind the reasoning in which the prompt ends', async t => {
  const valid = ajv.compile(schema)
  const languages: [object, (content: string) => boolean][] = [
    [{ response_format: format }, content => valid(JSON.parse(content))],
    [{ structured_outputs: { json: schema } }, content => valid(JSON.parse(content))],
    [{ regex: '[a-f]{3}-\\d{2}' }, content => /^[a-f]{3}-\d{2}$/.test(content)],
    [{ ebnf: 'root ::= "<" [a-z]{2,5} ">"' }, content => /^<[a-z]{2,5}>$/.test(content)]
  ]
  for (const [language, holds] of languages) {
    const sampled = await ask({ ...thinking, ...language, n: 5, seed: 3, temperature: 1 })
    const greedy = await ask({ ...thinking, ...language, temperature: 0, logit_bias: { [END_OF_THINK]: 100, 2: -100 } })
    for (const { message: { content }, finish_reason: reason, token_ids: ids } of [...sampled, ...greedy]) {
      t.equal(reason, 'stop')
      t.ok(holds(content), content)
      t.equal(ids.filter(id => id === END_OF_THINK).length, 1)
    }
    t.ok(sampled.some(({ message }) => message.reasoning !== null), 'reasoning is free')
  }
})

t.test('a reply may begin with reasoning that the prompt has not opened', async t => {
  const valid = ajv.compile(schema)
  const bias = { logit_bias: { [THINK]: 1, [END_OF_THINK]: 4, 2: -100 } }
  const open = await ask({ response_format: format, n: 12, seed: 1, temperature: 1, ...bias })
  for (const { message: { content } } of open) t.ok(valid(JSON.parse(content)), content)
  t.same(new Set(open.map(({ token_ids: ids }) => ids[0] === THINK)), new Set([true, false]))
  for (const { message, token_ids: ids } of open) if (ids[0] !== THINK) t.equal(message.reasoning, null)
  t.ok(open.some(({ message }) => message.reasoning !== null))
  const off = { chat_template_kwargs: { thinking: false } }
  for (
    const { message, token_ids: ids } of await ask({
      response_format: format,
      n: 6,
      seed: 9,
      temperature: 1,
      ...bias,
      ...off
    })
  ) {
    t.ok(valid(JSON.parse(message.content)), message.content)
    t.notOk(ids.includes(THINK))
  }
})

t.test('enableInReasoning constrains reasoning, too', async t => {
  const inside = await start({ reasoningParser: 'qwen3', enableInReasoning: true })
  const tag = {
    type: 'structural_tag',
    format: {
      type: 'sequence',
      elements: [
        { type: 'regex', pattern: '[ab]{1,9}' },
        { type: 'const_string', value: '</think>' },
        { type: 'json_schema', json_schema: schema }
      ]
    }
  }
  const valid = ajv.compile(schema)
  for (const { message } of await ask({ ...thinking, response_format: tag, n: 4, temperature: 1 }, inside)) {
    t.match(message.reasoning, /^[ab]{1,9}$/)
    t.ok(valid(JSON.parse(message.content)), message.content)
  }
  const [json] = await ask({ ...thinking, response_format: format, temperature: 1 }, inside)
  t.ok(valid(JSON.parse(json!.message.reasoning!)), 'without an end, the JSON is the reasoning')
})

const parameters = [
  schema,
  {
    type: 'object',
    properties: { zone: { enum: ['utc', 'é'] }, at: { type: 'array', items: { type: 'boolean' }, maxItems: 2 } },
    required: ['zone']
  }
]
const tools = parameters.map((parameters, i) => ({ type: 'function', function: { name: `tool_${i}`, parameters } }))
const named = { type: 'function', function: { name: 'tool_1' } }

/** The calls of a stream by choice. */
async function streamed (body: object, at: string): Promise<any[][]> {
  const { text } = await call(`${at}/v1/chat/completions`, { messages, max_tokens: 400, stream: true, ...body })
  const calls: any[][] = []
  for (const { choices } of frames(text).filter(frame => typeof frame === 'object')) {
    for (const { index, delta } of choices) {
      t.notOk(delta.content, 'no text besides calls')
      for (const { index: _, id: __, ...rest } of delta.tool_calls ?? []) (calls[index] ??= []).push(rest)
    }
  }
  return calls
}

t.test('required and named calls are valid for the parameters of their function', async t => {
  const valid = parameters.map(schema => ajv.compile(schema))
  const bare = await start()
  for (const at of [bare, url]) {
    for (
      const [choice, more] of [['required', {}], [named, {}], ['required', { parallel_tool_calls: false }]] as const
    ) {
      const sampling = { n: 4, seed: 5, temperature: 1, logit_bias: { 2: -100, [END_OF_THINK]: 4 } }
      const body = { tools, tool_choice: choice, ...more, ...sampling }
      const choices = await ask(body, at)
      for (const { message, finish_reason: reason } of choices) {
        const calls = message.tool_calls!
        t.equal(message.content, '')
        t.equal(reason, choice === named ? 'stop' : 'tool_calls')
        for (const { function: { name, arguments: args } } of calls) {
          t.ok(valid[Number(name.slice(5))]!(JSON.parse(args)), `${name} ${args}`)
        }
        if (choice === named) t.same(calls.map(call => call.function.name), ['tool_1'])
        if ('parallel_tool_calls' in more) t.equal(calls.length, 1)
      }
      t.same(
        await streamed(body, at),
        choices.map(({ message }) => message.tool_calls!.map(({ id: _, ...rest }) => rest)),
        'a stream has the same calls'
      )
    }
  }
})

t.test('required calls come behind the reasoning', async t => {
  const valid = parameters.map(schema => ajv.compile(schema))
  const choices = await ask({ ...thinking, tools, tool_choice: 'required', n: 6, seed: 2, temperature: 1 })
  for (const { message } of choices) {
    const [{ function: { name, arguments: args } }] = message.tool_calls!
    t.ok(valid[Number(name.slice(5))]!(JSON.parse(args)), args)
  }
  t.ok(choices.some(({ message }) => message.reasoning !== null))
})
