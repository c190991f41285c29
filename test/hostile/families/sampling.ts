import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { packageRoot } from '../../../src/root.ts'
import type { Random } from '../lib/random.ts'
import { RawClient, rawPost } from '../lib/raw.ts'
import type { Family, World } from '../lib/world.ts'

type Schema = { $ref?: string, anyOf?: Schema[], properties?: Record<string, Schema>, [more: string]: unknown }
type Body = Record<string, unknown>

const MESSAGES = [{ role: 'user', content: '1+1=' }]
/** Routes that generate, a small body of each, and where its sampling parameters are. */
const ROUTES: [path: string, body: Body, sampling?: string][] = [
  ['/generate', { text: '1+1=', sampling_params: { max_new_tokens: 2 } }, 'sampling_params'],
  ['/v1/completions', { prompt: '1+1=', max_tokens: 2 }],
  ['/v1/chat/completions', { messages: MESSAGES, max_tokens: 2 }],
  ['/v1/responses', { input: '1+1=', max_output_tokens: 2 }],
  ['/v1/messages', { messages: MESSAGES, max_tokens: 2 }],
  ['/inference/v1/generate', { token_ids: [3, 4], sampling_params: { max_tokens: 2 } }, 'sampling_params'],
  ['/generate/', { prompts: ['1+1='], max_tokens: 2 }],
  ['/get_sequence_logprobs/', { sequences: [[3, 4, 5]], prompt_lengths: [1] }],
  ['/tokenize', { prompt: '1+1=' }],
  ['/detokenize', { tokens: [3, 4] }]
]
/** Written into the JSON as they are: JSON.stringify would make null of some. */
const NUMBERS = [
  '-1',
  '0',
  '-0',
  '1e308',
  '1e999',
  '-1e999',
  '1e-320',
  '2147483648',
  '-2147483649',
  '9007199254740993',
  '18446744073709551616',
  '0.1',
  '1.5',
  'NaN',
  'Infinity',
  '01',
  '1e5',
  '4294967295',
  '64'
]
const OTHERS = [
  'null',
  'true',
  'false',
  '""',
  '"a"',
  '"NaN"',
  '"1e9"',
  '[]',
  '[null]',
  '[[]]',
  '[[1,2],[3]]',
  '{}',
  '{"a":1}',
  '{"__proto__":{"x":1}}',
  '{"constructor":{"prototype":{"x":1}}}',
  '{"0":1e9,"-1":2,"x":3}',
  '"\\u0000"',
  '"\\ud800"',
  '[1e9,-1,0.5]',
  '{"1":1e308}',
  '"("',
  '"(a+)+$"',
  '[""]'
]

/** Values of sampling parameters, and fields of every other kind: an answer or a refusal, never a 500. */
export const sampling: Family = {
  name: 'sampling',
  attack: async (world, random) => {
    const document = readDocument()
    for (const [path, body, nested] of ROUTES) {
      const fields = propertiesOf(document, path)
      const inner = nested === undefined ? [] : propertiesOf(document, path, nested)
      for (let i = 0; i < 25; i++) await ask(world, random, path, changed(random, body, { fields, nested, inner }))
    }
    await odd(world, random)
  }
}

function readDocument (): { paths: any, components: { schemas: Record<string, Schema> } } {
  return JSON.parse(readFileSync(join(packageRoot, 'openapi/openapi.json'), 'utf8'))
}

function propertiesOf (document: ReturnType<typeof readDocument>, path: string, field?: string): string[] {
  const resolve = (schema: Schema): Schema => {
    const found = schema.$ref === undefined ? schema : document.components.schemas[schema.$ref.split('/').at(-1)!]!
    if (found.properties !== undefined || found.anyOf === undefined) return found
    return found.anyOf.map(resolve).find(({ properties }) => properties !== undefined) ?? found
  }
  const body = resolve(document.paths[path].post.requestBody.content['application/json'].schema)
  return Object.keys((field === undefined ? body : resolve(body.properties![field]!)).properties ?? {})
}

/** JSON of the body with one to three fields replaced. */
function changed (
  random: Random,
  body: Body,
  { fields, nested, inner }: { fields: string[], nested: string | undefined, inner: string[] }
): string {
  const texts = new Map(Object.entries(body).map(([name, value]) => [name, JSON.stringify(value)]))
  const value = (): string => random.pick(random.below(2) === 0 ? NUMBERS : OTHERS)
  for (const name of random.some(fields, 1 + random.below(2))) texts.set(name, value())
  if (nested !== undefined && random.below(4) > 0) {
    const own = new Map(Object.entries(body[nested] as Body).map(([name, value]) => [name, JSON.stringify(value)]))
    for (const name of random.some(inner, 1 + random.below(3))) own.set(name, value())
    texts.set(nested, toJson(own))
  }
  return toJson(texts)
}

function toJson (fields: Map<string, string>): string {
  return `{${[...fields].map(([name, text]) => `${JSON.stringify(name)}:${text}`).join(',')}}`
}

async function ask (world: World, random: Random, path: string, body: string): Promise<void> {
  const target = random.below(4) === 0 ? world.gateway : world.open
  const reply = await target.call(path, { body, headers: { 'content-type': 'application/json' }, timeoutMs: 60_000 })
  const isGood = reply.status === 200 || (reply.status >= 400 && reply.status < 500) || reply.status === 503
  world.check(
    'a request with odd values is answered or refused',
    isGood,
    () => `${target.name} ${path} ${body}: ${reply.status} ${reply.text.slice(0, 500)}`
  )
  if (reply.status >= 400) return
  const areJson = valuesOf(reply.text).every(isJson)
  world.check('an answer is JSON', areJson, () => `${path} ${body}: ${reply.text.slice(0, 500)}`)
}

/** The values of a stream's events, or the whole answer. */
function valuesOf (text: string): string[] {
  if (!/^(event|data):/.test(text)) return [text]
  return [...text.matchAll(/^data: ?(.*)$/gm)].map(([, value]) => value!).filter(value => value !== '[DONE]')
}

/** Bodies that are no JSON of an object, or whose texts are no Unicode. */
async function odd (world: World, random: Random): Promise<void> {
  const question = JSON.stringify(ROUTES[0]![1])
  const bodies = [
    '[]',
    'null',
    '1',
    '""',
    '{',
    '{"text":"a"}}',
    '{"text":"a",}',
    '{"text":"a" "b":1}',
    `\ufeff${question}`,
    '{"text":"a","text":"b"}',
    '{"text":"\t"}',
    `{"text":${'['.repeat(5000)}`,
    `${'{"a":'.repeat(5000)}1`,
    question.slice(0, random.below(question.length)),
    random.damaged(Buffer.from(question), 2).toString('latin1')
  ]
  for (const body of bodies) {
    const client = await RawClient.open(world.open.port)
    client.send(rawPost('/generate', body))
    client.send(Buffer.from([0xff, 0xfe]))
    const [status = 0] = await client.replies(1, 30_000)
    client.end()
    world.check(
      'a body that is no object is refused or answered',
      status === 200 || (status >= 400 && status < 500),
      () => `${JSON.stringify(body.slice(0, 300))}: ${client.text.slice(0, 300)}`
    )
  }
}

function isJson (text: string): boolean {
  try {
    JSON.parse(text)
    return true
  } catch {
    return false
  }
}
