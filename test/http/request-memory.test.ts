import t from 'tap'
import { RefitError } from '../../src/errors.ts'
import { RequestMemory, resultBytes } from '../../src/http/generation/request-memory.ts'
import type { SampleRequest } from '../../src/http/generation/generation.ts'
import { PLAIN_SAMPLING } from '../../src/http/generation/plain-sampling.ts'
import { FakeEngine } from '../helpers/fake-engine.ts'
import { call, routeApp, until } from '../helpers/route-app.ts'

const MIB = 2 ** 20

function sample (more: Partial<SampleRequest> = {}, maxNewTokens = 100): SampleRequest {
  return {
    rid: 'r',
    names: [],
    promptIds: new Int32Array(10),
    sampling: { ...PLAIN_SAMPLING, maxNewTokens },
    logprobs: null,
    text: { stop: [], noStopTrim: false, skipSpecialTokens: true, spacesBetweenSpecialTokens: true },
    cacheSalt: undefined,
    ...more
  }
}

t.test('everything that multiplies counts', async t => {
  const bytes = (samples: SampleRequest[], experts = 0): number => resultBytes(samples, experts).bytes
  const logprobs = { startLen: null, top: 0, ids: [], raw: false }
  const plain = bytes([sample()])
  t.equal(bytes([sample(), sample()]), 2 * plain)
  for (
    const [name, more, maxNewTokens] of [
      ['tokens', {}, 1000],
      ['logprobs', { logprobs }, 100],
      ['a mask', { kept: true }, 100],
      ['experts', { expertsFrom: 0 }, 100],
      ['ids by position', { scores: { from: 1, width: 2, ids: new Int32Array(18) } }, 100]
    ] as const
  ) t.ok(bytes([sample(more, maxNewTokens)], 16) > plain, name)
  const scored = bytes([sample({ logprobs })])
  for (
    const [name, more] of [
      ['top logprobs', { top: 5 }],
      ['ids', { ids: [1, 2] as number[] }],
      ['the prompt', { startLen: 0 }]
    ] as const
  ) t.ok(bytes([sample({ logprobs: { ...logprobs, ...more } })]) > scored, name)
})

t.test('memory is reserved until it is released, once', async t => {
  const one = resultBytes([sample()], 0).bytes
  const memory = new RequestMemory(2 * one, 3 * one)
  t.throws(() => memory.claim([sample(), sample(), sample()], 0), { code: 'INVALID_REQUEST', message: /3 samples/ })
  const first = memory.claim([sample(), sample()], 0)
  memory.claim([sample()], 0)
  t.throws(() => memory.claim([sample()], 0), { code: 'NO_MEMORY', statusCode: 503, message: /send it again later/ })
  first()
  first()
  memory.claim([sample(), sample()], 0)
  t.throws(() => memory.claim([sample()], 0), { code: 'NO_MEMORY' }, 'a second release has no effect')
})

const ALL = Array.from({ length: 250 }, (_, i) => i)

t.test('a request whose results are too large is refused before anything of it is queued', async t => {
  const engine = new FakeEngine({ info: { maxQueuedRequests: 4096 } })
  const { url } = await routeApp(t, { engine, maxRequestMemory: 8 * MIB })
  const messages = [{ role: 'user', content: 'a' }]
  for (
    const [path, body] of [
      [
        '/generate',
        {
          text: 'a',
          return_logprob: true,
          token_ids_logprob: ALL,
          sampling_params: { n: 64, max_new_tokens: 60 }
        }
      ],
      ['/generate', {
        text: 'a',
        stream: true,
        return_logprob: true,
        top_logprobs_num: 250,
        sampling_params: { n: 64, max_new_tokens: 60 }
      }],
      ['/generate', {
        text: Array(64).fill('abc'.repeat(20)),
        return_logprob: true,
        logprob_start_len: 0,
        top_logprobs_num: 250,
        sampling_params: { max_new_tokens: 1 }
      }],
      ['/v1/completions', { prompt: 'a', n: 64, max_tokens: 60, logprobs: 250 }],
      ['/v1/chat/completions', { messages, n: 64, max_tokens: 60, logprobs: true, top_logprobs: 250 }],
      ['/inference/v1/generate', { token_ids: [65], sampling_params: { n: 64, max_tokens: 60, logprobs: 250 } }],
      ['/inference/v1/generate', {
        token_ids: [65],
        sampling_params: { n: 64, max_tokens: 60, logprob_token_ids: ALL }
      }],
      ['/generate/', { prompts: ['a'], n: 64, max_tokens: 60, logprobs: 250 }],
      ['/get_sequence_logprobs/', {
        sequences: Array(64).fill(Array(60).fill(65)),
        prompt_lengths: Array(64).fill(1),
        top_logprobs: 250
      }]
    ] as const
  ) {
    const { status, text } = await call(url + path, body)
    t.equal(status, 400, `${path} ${text.slice(0, 300)}`)
    t.match(text, /could take \d+ MiB, and at most 8 MiB.*--max-request-memory.*most of them are scores/, path)
  }
  t.equal(engine.requests.length, 0, 'the engine got none of them')
})

t.test('memory is free again when the reply has ended, was refused, or its client has left', async t => {
  const { prototype } = RequestMemory
  const { claim } = prototype
  const held = new Set<number>()
  let claims = 0
  const watched: typeof claim = function (this: RequestMemory, ...args) {
    const release = claim.apply(this, args)
    const number = claims++
    held.add(number)
    return () => {
      release()
      held.delete(number)
    }
  }
  Reflect.set(prototype, 'claim', watched)
  t.teardown(() => Reflect.set(prototype, 'claim', claim))
  const { url } = await routeApp(t, { engine: new FakeEngine({ stepMs: 5 }) })
  const body = { text: 'a', sampling_params: { max_new_tokens: 3 } }
  await call(`${url}/generate`, body)
  await call(`${url}/generate`, { ...body, stream: true })
  const leaving = new AbortController()
  const left = call(`${url}/generate`, undefined, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ text: 'a', sampling_params: { max_new_tokens: 90 } }),
    signal: leaving.signal
  })
  await until(() => claims === 3)
  t.equal(held.size, 1, 'only the request under way holds memory')
  leaving.abort()
  await t.rejects(left)
  await until(() => held.size === 0)
})

t.test('kept sets that are larger than usual end their request', async t => {
  const memory = new RequestMemory(100)
  memory.checkKept(25)
  t.throws(() => memory.checkKept(26), RefitError)
})
