import t from 'tap'
import { FakeEngine } from '../helpers/fake-engine.ts'
import { routeApp } from '../helpers/route-app.ts'

async function post (url: string, body: object): Promise<{ status: number, json: any }> {
  const reply = await fetch(url, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify(body)
  })
  return { status: reply.status, json: await reply.json() }
}

const SCHEMA = { type: 'object', properties: { b: { type: 'null' }, a: {} } }
const TAG = { structures: [{ begin: '<f>', schema: {}, end: '</f>' }], triggers: ['<f'] }

t.test('every spelling of structured output reaches the engine as a grammar', async t => {
  const { url, engine } = await routeApp(t)
  const messages = [{ role: 'user', content: 'x' }]
  const chat = ['/v1/chat/completions', { messages, max_tokens: 1 }] as const
  const completions = ['/v1/completions', { prompt: 'a', max_tokens: 1 }] as const
  const schema = JSON.stringify(SCHEMA)
  const cases: [readonly [string, object], object, unknown][] = [
    [chat, { response_format: { type: 'text' } }, undefined],
    [chat, { response_format: { type: 'json_object' } }, { kind: 'json_object' }],
    [chat, { response_format: { type: 'json_schema', json_schema: { name: 'x', strict: true, schema: SCHEMA } } }, {
      kind: 'json_schema',
      schema
    }],
    [completions, { response_format: { type: 'structural_tag', ...TAG } }, {
      kind: 'structural_tag',
      tag: JSON.stringify(TAG)
    }],
    [chat, { response_format: { type: 'structural_tag', format: { type: 'any_text' } } }, {
      kind: 'structural_tag',
      tag: '{"format":{"type":"any_text"}}'
    }],
    [chat, { regex: 'a+' }, { kind: 'regex', pattern: 'a+' }],
    [chat, { ebnf: 'root ::= "a"' }, { kind: 'ebnf', grammar: 'root ::= "a"' }],
    [completions, { structured_outputs: { json: SCHEMA, disable_any_whitespace: true } }, {
      kind: 'json_schema',
      schema,
      compact: true
    }],
    [chat, { structured_outputs: { choice: ['a', 'b'] } }, { kind: 'choice', choices: ['a', 'b'] }],
    [chat, { structured_outputs: { grammar: 'root ::= "a"' } }, { kind: 'ebnf', grammar: 'root ::= "a"' }],
    [chat, { structured_outputs: { json_object: true } }, { kind: 'json_object' }],
    [chat, { structured_outputs: { structural_tag: TAG } }, { kind: 'structural_tag', tag: JSON.stringify(TAG) }],
    [['/generate', { input_ids: [5] }], { sampling_params: { json_schema: schema, max_new_tokens: 1 } }, {
      kind: 'json_schema',
      schema
    }],
    [['/generate', { input_ids: [5] }], { sampling_params: { regex: 'b', max_new_tokens: 1 } }, {
      kind: 'regex',
      pattern: 'b'
    }],
    [['/inference/v1/generate', { token_ids: [5] }], {
      sampling_params: { max_tokens: 1, structured_outputs: { regex: 'c' } }
    }, {
      kind: 'regex',
      pattern: 'c'
    }]
  ]
  for (const [[path, body], fields, grammar] of cases) {
    const { status, json } = await post(url + path, { ...body, ...fields })
    t.equal(status, 200, JSON.stringify(json))
    t.same(engine.requests.at(-1)!.grammar, grammar, JSON.stringify(fields))
  }
})

t.test('allowed tokens and bad words reach the engine on routes with fields of vLLM', async t => {
  const { url, engine } = await routeApp(t)
  for (
    const [path, body] of [
      ['/inference/v1/generate', {
        token_ids: [5],
        sampling_params: { max_tokens: 1, allowed_token_ids: [7, 8], bad_words: ['ab', ' c'] }
      }],
      ['/v1/completions', { prompt: 'a', max_tokens: 1, allowed_token_ids: [7, 8], bad_words: ['ab', ' c'] }],
      ['/v1/chat/completions', {
        messages: [{ role: 'user', content: 'x' }],
        max_tokens: 1,
        allowed_token_ids: [7, 8],
        bad_words: ['ab', ' c']
      }]
    ] as const
  ) {
    t.equal((await post(url + path, body)).status, 200)
    const { allowedTokenIds, badWords } = engine.requests.at(-1)!.sampling
    t.same(allowedTokenIds, [7, 8])
    // With this tokenizer of bytes, a space makes a longer list, so it is no variant.
    t.same(badWords, [[97, 98], [99]])
  }
})

t.test('several kinds, unknown ones and removed fields are refused by name', async t => {
  const { url, engine } = await routeApp(t)
  const refused = async (fields: object, message: RegExp, param: string): Promise<void> => {
    const { status, json } = await post(`${url}/v1/completions`, { prompt: 'a', ...fields })
    t.equal(status, 400)
    t.match(json.error, { message, param })
  }
  await refused({ regex: 'a', ebnf: 'b' }, /only one of regex and ebnf may be set/, 'ebnf')
  await refused(
    { regex: 'a', response_format: { type: 'json_object' } },
    /only one of response_format and regex/,
    'regex'
  )
  await refused({ structured_outputs: {} }, /expected exactly one of json, regex/, 'structured_outputs')
  await refused(
    { structured_outputs: { regex: 'a', json_object: true } },
    /only one of/,
    'structured_outputs.json_object'
  )
  await refused(
    { structured_outputs: { regex: 'a', whitespace_pattern: 'x' } },
    /patterns of white space: not supported/,
    'structured_outputs.whitespace_pattern'
  )
  await refused(
    { guided_json: {}, guided_regex: 'a' },
    /this field, which vLLM has removed: not supported by this server; send structured_outputs/,
    'guided_regex'
  )
  await refused(
    { response_format: { type: 'xml' } },
    /expected text, json_object, json_schema or structural_tag, got xml/,
    'response_format.type'
  )
  await refused(
    { response_format: { type: 'json_schema' } },
    /is missing; expected a JSON schema/,
    'response_format.json_schema.schema'
  )
  await refused({ allowed_token_ids: [] }, /is empty; leave it out/, 'allowed_token_ids')
  await refused({ allowed_token_ids: [300] }, /has 300; expected token ids from 0 to 299/, 'allowed_token_ids')
  await refused({ bad_words: [' '] }, /" " has no tokens/, 'bad_words')
  const many = await post(`${url}/generate`, { input_ids: [5], sampling_params: { json_schema: '{}', regex: 'a' } })
  t.match(many, { status: 400, json: { message: /only one of sampling_params.json_schema and sampling_params.regex/ } })
  t.equal(engine.requests.length, 0)
  const bare = await routeApp(t, { tokenizer: null, engine: new FakeEngine() })
  t.match(await post(`${bare.url}/v1/completions`, { prompt: [5], bad_words: ['a'] }), {
    status: 400,
    json: { error: { param: 'bad_words' } }
  })
})
