import t from 'tap'
import { openApiDocument } from '../../src/app/openapi.ts'
import { ACCEPTED, REFUSED } from '../../src/http/schemas.ts'
import type { RefusedField } from '../../src/http/schemas.ts'
import { call, routeApp } from '../helpers/route-app.ts'

// The schemas of the generation routes are the table of their fields: refused and accepted fields are marked, all
// others are served. test/trainers/test_fields.py compares the table with the released servers.

interface Schema {
  $ref?: string
  properties?: Record<string, Schema>
  anyOf?: Schema[]
  [ACCEPTED]?: boolean
  [REFUSED]?: RefusedField
}

/** The smallest body of each route that generates. */
const ROUTES: Record<string, object> = {
  '/generate': { input_ids: [5], sampling_params: { max_new_tokens: 1 } },
  '/v1/completions': { prompt: [5], max_tokens: 1 },
  '/v1/chat/completions': { messages: [{ role: 'user', content: 'hi' }], max_tokens: 1 },
  '/v1/chat/completions/tokens': { messages: [{ role: 'user', content: 'hi' }], tokens: [5], max_tokens: 1 },
  '/v1/chat/completions/render': { messages: [{ role: 'user', content: 'hi' }], max_tokens: 1 },
  '/inference/v1/generate': { token_ids: [5], sampling_params: { max_tokens: 1 } },
  '/skyrl/v1/generate': { token_ids: [5], sampling_params: { max_tokens: 1 } },
  '/v1/responses': { input: 'hi', max_output_tokens: 1 },
  '/v1/messages': { messages: [{ role: 'user', content: 'hi' }], max_tokens: 1, thinking: { type: 'enabled' } },
  '/generate/': { prompts: [[5]], max_tokens: 1 },
  '/chat/': { messages: [[{ role: 'user', content: 'hi' }]], max_tokens: 1 }
}

const document: any = JSON.parse(JSON.stringify(await openApiDocument()))

function resolve (schema: Schema): Schema {
  return schema.$ref === undefined ? schema : document.components.schemas[schema.$ref.split('/').at(-1)!]
}

function bodyOf (path: string): Schema {
  return resolve(document.paths[path].post.requestBody.content['application/json'].schema)
}

function branchesOf (schema: Schema): Schema[] {
  const whole = resolve(schema)
  return [whole, ...(whole.anyOf ?? []).flatMap(branchesOf)]
}

interface Field {
  path: string[]
  refused: RefusedField | undefined
  accepted: boolean
}

/** The fields of a body, those of objects in it included. */
function fieldsOf (schema: Schema, at: string[] = []): Field[] {
  return Object.entries(schema.properties ?? {}).flatMap(([name, field]) => {
    const path = [...at, name]
    const inner = branchesOf(field).filter(one => one.properties !== undefined)
    return [
      { path, refused: field[REFUSED], accepted: field[ACCEPTED] ?? false },
      ...inner.flatMap(one => fieldsOf(one, path))
    ]
  })
}

function withField (body: any, [name, ...rest]: string[], value: unknown): object {
  return { ...body, [name!]: rest.length === 0 ? value : withField(body[name!] ?? {}, rest, value) }
}

for (const [path, body] of Object.entries(ROUTES)) {
  t.test(`${path} refuses by name each field that it marks as refused, unless it is null or the default`, async t => {
    const { url, engine } = await routeApp(t)
    t.equal((await call(url + path, body)).status, 200)
    const fields = fieldsOf(bodyOf(path)).filter(({ refused }) => refused !== undefined)
    t.ok(fields.length > 3)
    const before = engine.requests.length
    for (const { path: field, refused } of fields) {
      const param = field.join('.')
      const value = path === '/generate/' && param === 'images' ? [['x']] : 'x'
      const reply = await call(url + path, withField(body, field, value))
      const message = reply.json.error?.message ?? reply.json.message
      t.equal(reply.status, 400, param)
      t.equal(reply.json.error.code, 'UNSUPPORTED', param)
      t.equal(reply.json.param ?? reply.json.error.param, param)
      t.match(message, `${param}: ${refused!.feature}: not supported by this server; `)
    }
    t.equal(engine.requests.length, before, 'no refused request reaches the engine')
    let harmless = body
    for (const { path: field, refused } of fields) {
      // An object of vLLM's that is not null must have a grammar.
      if (field.includes('structured_outputs')) continue
      harmless = withField(harmless, field, refused!.unless?.[0] ?? null)
    }
    t.equal((await call(url + path, harmless)).status, 200)
  })

  t.test(`${path} accepts any value of a field that it marks as accepted, and generates the same`, async t => {
    const { url, engine } = await routeApp(t)
    const plain = await call(url + path, body)
    let other = body
    for (const { path: field, accepted } of fieldsOf(bodyOf(path))) if (accepted) other = withField(other, field, 'x')
    const reply = await call(url + path, other)
    t.equal(reply.status, 200, reply.text)
    const [first, second] = engine.requests
    if (first === undefined) t.equal(path, '/v1/chat/completions/render')
    else t.same({ ...second, rid: '' }, { ...first, rid: '' })
    t.same(Object.keys(reply.json), Object.keys(plain.json))
  })
}

/** Fields that change no token and no score: the prompt itself, its rendering, and the form of the reply. */
const FORM = new Set((
  'add_generation_prompt add_special_tokens background cache_salt chat_template_kwargs container ' +
  'continue_final_message detokenize documents enable_response_messages extra_key generation_kwargs ' +
  'include include_reasoning include_stop_str_in_output input instructions mcp_servers messages model ' +
  'no_stop_trim output_config output_mode parallel_tool_calls parse_context prompt prompts reasoning ' +
  'reasoning_effort receipt request_id return_flat_raw_top_logprobs_b64 return_full_logprobs ' +
  'return_meta_info return_prompt_text return_prompt_token_ids return_raw_logprobs ' +
  'return_routed_experts return_sample_support return_text_in_logprobs return_token_ids ' +
  'return_tokens_as_token_ids rid routed_experts_start_len separate_reasoning skip_special_tokens ' +
  'spaces_between_special_tokens stream stream_deltas stream_interval stream_options stream_reasoning ' +
  'system text thinking token_ids tokens tool_choice tools truncation_side'
)
  .split(' '))
/** Objects of sampling parameters. */
const PARAMS = /^(sampling_params|generation_kwargs)$/

t.test('a field that changes tokens is refused by name on the routes that do not know it', async t => {
  const { url, engine } = await routeApp(t)
  const known = (path: string): Field[] =>
    fieldsOf(bodyOf(path)).filter(({ path: [first, ...rest] }) =>
      rest.length === 0 || (rest.length === 1 && PARAMS.test(first!))
    )
  const names = new Set(
    Object.keys(ROUTES).flatMap(known).filter(({ accepted }) => !accepted).map(({ path }) => path.at(-1)!)
  )
  const ignored: string[] = []
  for (const [path, body] of Object.entries(ROUTES)) {
    const fields = known(path).map(field => field.path.join('.'))
    for (const outer of ['', 'sampling_params', 'generation_kwargs']) {
      if (outer !== '' && !fields.includes(outer)) continue
      for (const name of names) {
        const at = outer === '' ? [name] : [outer, name]
        const param = at.join('.')
        if (FORM.has(name) || fields.includes(param)) continue
        const reply = await call(url + path, withField(body, at, 'x'))
        if (reply.status !== 400 || (reply.json.param ?? reply.json.error.param) !== param) ignored.push(path + param)
      }
    }
  }
  t.same(ignored, [])
  t.ok(names.size > 100)
  t.equal(engine.requests.length, 0)
})

t.test('every route that generates is in the list above', async t => {
  const generating = Object.keys(document.paths).filter(path => {
    const { post } = document.paths[path]
    return post?.requestBody?.content['application/json'] !== undefined &&
      ['generation', 'openai'].includes(post.tags[0]) && fieldsOf(bodyOf(path))
      .some(({ path: field }) => /^(max_tokens|max_new_tokens|max_output_tokens)$/.test(field.at(-1)!))
  })
  t.same(generating.sort(), Object.keys(ROUTES).sort())
})

t.test('truncate_prompt_tokens keeps the tokens of one side of the prompt', async t => {
  const { url, engine } = await routeApp(t)
  const prompt = Array.from({ length: 20 }, (_, i) => i + 1)
  const cases: [object, number[]][] = [
    [{ truncate_prompt_tokens: 3 }, [18, 19, 20]],
    [{ truncate_prompt_tokens: 3, truncation_side: 'right' }, [1, 2, 3]],
    [{ truncate_prompt_tokens: 30 }, prompt],
    [{ truncate_prompt_tokens: -1 }, prompt]
  ]
  for (const [fields, expected] of cases) {
    t.equal((await call(`${url}/v1/completions`, { prompt, max_tokens: 1, ...fields })).status, 200)
    t.same([...engine.requests.at(-1)!.inputIds], expected)
  }
  const long = Array.from({ length: 600 }, (_, i) => i % 250)
  t.equal((await call(`${url}/v1/completions`, { prompt: long, truncate_prompt_tokens: -1 })).status, 200)
  t.same([...engine.requests.at(-1)!.inputIds], long.slice(-511), 'one token of the context is left for the output')
  for (const most of [0, 513]) {
    const { status, json } = await call(`${url}/v1/completions`, { prompt, truncate_prompt_tokens: most })
    t.equal(status, 400)
    t.match(json.error, {
      param: 'truncate_prompt_tokens',
      message: new RegExp(`1 to the context length 512, got ${most}`)
    })
  }
  const messages = [{ role: 'user', content: 'hello' }]
  await call(`${url}/v1/chat/completions`, { messages, max_tokens: 1, truncate_prompt_tokens: 4 })
  t.equal(Buffer.from(engine.requests.at(-1)!.inputIds).toString(), 'ant:')
})
