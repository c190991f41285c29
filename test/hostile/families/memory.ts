import { setTimeout as sleep } from 'node:timers/promises'
import type { Random } from '../lib/random.ts'
import { RawClient, rawPost } from '../lib/raw.ts'
import type { Target } from '../lib/target.ts'
import type { Family, World } from '../lib/world.ts'

const MIB = 2 ** 20
const JSON_HEAD = 'host: localhost\r\ncontent-type: application/json\r\n'

/** Requests that take memory, time or descriptors. /health is polled meanwhile, and memory is measured afterwards. */
export const memory: Family = {
  name: 'memory',
  attack: async (world, random) => {
    for (const target of [world.open, world.gateway]) {
      await heldBodies(world, target)
      await wholeBodies(world, target)
    }
    for (const [name, path, body] of costly(world.isLong ? 10 : 1)) await costs(world, name, path, body)
    await unread(world, random)
    await manyConnections(world)
  }
}

/** Bodies that are nearly whole, all at once: more than fits in the heap. */
async function heldBodies (world: World, target: Target): Promise<void> {
  const size = 7 * MIB
  const clients = await Promise.all(Array.from({ length: 60 }, async () => await RawClient.open(target.port)))
  const part = Buffer.alloc(MIB, ' ')
  for (const client of clients) {
    client.send(`POST /generate HTTP/1.1\r\n${JSON_HEAD}content-length: ${size}\r\n\r\n`)
    for (let sent = 0; sent < 6; sent++) client.send(part)
  }
  await sleep(500)
  const reply = await target.call('/health', { timeoutMs: 60_000 })
  world.check('half-sent bodies shut nobody out of /health', reply.status === 200, () => `${target.name} ${reply.text}`)
  const wrong = clients.flatMap(({ statuses }) => statuses).filter(status => status < 400 || status === 500)
  world.check('half-sent bodies are held or refused', wrong.length === 0, () => wrong.join(' '))
  for (const client of clients) client.end()
}

/** Bodies that become large when they are read. */
async function wholeBodies (world: World, target: Target): Promise<void> {
  const bodies = [
    `[${'{},'.repeat(1_500_000)}{}]`,
    `{"text":"a","ignored":[${'[],'.repeat(1_500_000)}[]]}`,
    `{"text":"${'\\u0041'.repeat(1_000_000)}"}`,
    `{${Array.from({ length: 200_000 }, (_, i) => `"k${i}":1`).join(',')}}`,
    `{"text":"a","mark":"${'__refit'.repeat(90_000)}"}`,
    `{"text":${'['.repeat(3_000_000)}`,
    `{"text":"${'1+'.repeat(3_000_000)}"}`,
    `{"input_ids":[${'1,'.repeat(3_000_000)}1]}`,
    `{"text":"${'a'.repeat(9 * MIB)}"}`,
    // Just below the limit of values.
    `{"input_ids":[${'1,'.repeat(1_600_000)}1]}`,
    `{"input_ids":[${'[1],'.repeat(220_000)}[1]]}`,
    `{"text":[${Array.from({ length: 175_000 }, (_, i) => `"${i.toString(36)}"`).join(',')}]}`,
    `{"ignored":[${Array.from({ length: 42_000 }, (_, i) => `{"${i.toString(36)}":1}`).join(',')}]}`,
    `{"text":["1"],"sampling_params":[${'{"n":1},'.repeat(200_000)}{}]}`
  ]
  for (const [i, body] of bodies.entries()) {
    const headers = { 'content-type': 'application/json' }
    const { status, text } = await target.call('/generate', { body, headers })
    // A body beyond the limit may find the connection closed before all of it is sent.
    const isGood = (status >= 200 && status < 500) || status === 503 || /EPIPE|ECONNRESET|closed/.test(text)
    world.check(
      'bodies that grow are refused, or answered',
      isGood,
      () => `${target.name} body ${i}: ${status} ${text.slice(0, 300)}`
    )
  }
}

/** Short requests whose results multiply, or that cost much time. */
function costly (scale: number): [name: string, path: string, body: object][] {
  const ids = Array.from({ length: 520 }, (_, i) => i % 10)
  const sampling = { max_new_tokens: 20 * scale, ignore_eos: true }
  return [
    ['scores of 512 samples', '/generate', {
      text: '1',
      return_logprob: true,
      token_ids_logprob: ids,
      sampling_params: { ...sampling, n: 512 }
    }],
    ['a stream of 64 with scores', '/generate', {
      text: '1',
      return_logprob: true,
      top_logprobs_num: 10,
      stream: true,
      sampling_params: { ...sampling, n: 64 }
    }],
    ['samples of many prompts', '/v1/completions', { prompt: Array(2000).fill('1'), n: 128, max_tokens: 200 }],
    ['many prompts', '/generate', { text: Array(100_000).fill('1'), sampling_params: { max_new_tokens: 1 } }],
    ['stop texts', '/generate', {
      text: '1',
      sampling_params: { ...sampling, stop: Array(5000).fill('ab'.repeat(6)) }
    }],
    ['a long stop text', '/generate', { text: '1', sampling_params: { ...sampling, stop: ['a'.repeat(7 * MIB)] } }],
    ['a stop regex', '/generate', { text: '1', sampling_params: { ...sampling, stop_regex: ['(a+)+(b+)+(a|aa)+$'] } }],
    ['a logit bias', '/v1/completions', {
      prompt: '1',
      logit_bias: Object.fromEntries(
        Array.from({ length: 300_000 }, (_, i) => [String(i), 1])
      )
    }],
    ['many messages', '/v1/chat/completions', { messages: Array(scale * 5000).fill({ role: 'user', content: '1' }) }],
    ['a tool of 2 MB', '/v1/chat/completions', {
      messages: [{ role: 'user', content: '1' }],
      tools: [{ type: 'function', function: { name: 'a', description: 'a'.repeat(2 * MIB), parameters: {} } }]
    }],
    ['ids to read', '/detokenize', { tokens: Array(scale * 100_000).fill(5) }],
    ['a text to count', '/tokenize', { prompt: '12'.repeat(scale * 50_000) }],
    ['calls in a text', '/parse_function_call', {
      text: '<tool_call>'.repeat(200_000),
      tools: [],
      tool_call_parser: 'qwen25'
    }],
    ['reasoning in a text', '/separate_reasoning', { text: '<think>'.repeat(200_000), reasoning_parser: 'qwen3' }]
  ]
}

async function costs (world: World, name: string, path: string, body: object): Promise<void> {
  const reply = await world.open.call(path, { body, timeoutMs: 60_000 })
  const isGood = (reply.status >= 200 && reply.status < 500) || reply.status === 503
  world.check(
    'a costly request is answered or refused',
    isGood,
    () => `${name} ${path}: ${reply.status} after ${reply.ms.toFixed(0)} ms ${reply.text.slice(0, 300)}`
  )
}

/** Streams whose clients do not read. */
async function unread (world: World, random: Random): Promise<void> {
  const body = JSON.stringify({
    text: '1',
    stream: true,
    return_logprob: true,
    top_logprobs_num: 10,
    sampling_params: { max_new_tokens: 150, ignore_eos: true, n: 4 }
  })
  const clients = await Promise.all(Array.from({ length: 12 }, async () => await RawClient.open(world.open.port)))
  for (const client of clients) {
    client.socket.pause()
    client.send(rawPost('/generate', body))
  }
  await sleep(500 + random.below(500))
  const { status, text } = await world.open.call('/generate', {
    body: { text: '1+1=', sampling_params: { max_new_tokens: 1 } }
  })
  world.check('streams that nobody reads stop nobody else', status === 200, () => `${status} ${text.slice(0, 300)}`)
  for (const client of clients) client.end()
}

/** 300 connections that are idle, and 300 whose bodies were refused and never end. */
async function manyConnections (world: World): Promise<void> {
  const clients: RawClient[] = []
  for (let i = 0; i < 300; i++) {
    const idle = await RawClient.open(world.keyed.port)
    idle.send('GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n')
    const refused = await RawClient.open(world.keyed.port)
    refused.send(`POST /generate HTTP/1.1\r\n${JSON_HEAD}transfer-encoding: chunked\r\n\r\n1\r\n{\r\n`)
    clients.push(idle, refused)
  }
  const reply = await world.keyed.call('/health', { timeoutMs: 60_000 })
  world.check('600 idle and refused connections shut nobody out', reply.status === 200, () => reply.text)
  for (const client of clients) client.end()
}
