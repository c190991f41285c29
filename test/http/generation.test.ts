import t from 'tap'
import type { GenerateRequest, TokenEvent } from '../../src/contract/rollout-engine.ts'
import { RefitError } from '../../src/errors.ts'
import { call, routeApp, until } from '../helpers/route-app.ts'
import { FakeEngine } from '../helpers/fake-engine.ts'

t.test('if the queue refuses half of a batch, each request of the other half is aborted once', async t => {
  const engine = new FakeEngine({ info: { maxRunningRequests: 4, maxQueuedRequests: 60 } })
  const { url } = await routeApp(t, { engine })
  await engine.pause('in_place')
  const held = call(`${url}/generate`, { input_ids: [5], sampling_params: { n: 32, max_new_tokens: 1 } })
  await until(() => engine.live === 32)
  const refused = await call(`${url}/generate`, {
    input_ids: [5],
    sampling_params: { n: 64, max_new_tokens: 1 },
    rid: 'b'
  })
  t.equal(refused.json.error.code, 'QUEUE_FULL')
  t.equal(engine.calls.filter(name => name.startsWith('abort b_')).length, 32)
  t.equal(engine.live, 32, 'nothing is left of it')
  await engine.resume()
  t.equal((await held).json.length, 32)
})

t.test('the failure of any sample of a batch is the reply, and ends the others', async t => {
  class Failing extends FakeEngine {
    override async *generate (request: GenerateRequest): AsyncGenerator<TokenEvent, void, undefined> {
      // The others run by now.
      if (request.inputIds[0] === 66) {
        await until(() => this.live === 2)
        throw new RefitError('ENGINE_TORN', 'torn meanwhile')
      }
      yield* super.generate(request)
    }
  }
  for (const prompts of [[[66], [5], [6]], [[5], [66], [6]], [[5], [6], [66]]]) {
    const engine = new Failing({ stepMs: 20 })
    const { url } = await routeApp(t, { engine })
    const { status, json } = await call(`${url}/generate`, {
      input_ids: prompts,
      sampling_params: { max_new_tokens: 200 }
    })
    t.equal(status, 503)
    t.equal(json.error.code, 'ENGINE_TORN')
    t.equal(engine.live, 0)
  }
})

t.test('a stop text that names a special token is found, although special tokens are left out of the text', async t => {
  const { url } = await routeApp(t)
  const generate = async (input: number[], sampling: object) => {
    const { text, output_ids: ids, meta_info: { finish_reason: finish } } = (await call(`${url}/generate`, {
      input_ids: input,
      sampling_params: { max_new_tokens: input.length, ...sampling }
    }))
      .json
    return [text, ids.length, finish]
  }
  const [h, i, bos] = [104, 105, 256]
  t.same(await generate([h, i, bos, i], { stop: '<bos>' }), ['hi', 3, { type: 'stop', matched: '<bos>' }])
  t.same(
    await generate([h, i, bos, i], { stop: ['x', 'i<bos>'] }),
    ['h', 3, { type: 'stop', matched: 'i<bos>' }],
    'across the border'
  )
  t.same(await generate([h, i, bos, i], { stop: '<bos>', no_stop_trim: true }), ['hi', 3, {
    type: 'stop',
    matched: '<bos>'
  }])
  t.same(await generate([h, i, bos, i], { stop: '<bos>', skip_special_tokens: false, no_stop_trim: true }), [
    'hi<bos>',
    3,
    { type: 'stop', matched: '<bos>' }
  ])
  t.same(
    await generate([h, bos, i, i, h], { stop: '<bos>hi' }),
    ['hiih', 5, { type: 'length', length: 5 }],
    'held-back text is sent without the stop text'
  )
  t.same(
    await generate([h, i, bos, i, h], { stop: 'ii' }),
    ['h', 4, { type: 'stop', matched: 'ii' }],
    'stop texts without special tokens match the shown text'
  )
  t.same(await generate([h, i, bos, i], { stop: '<bos>', min_new_tokens: 4 }), ['hii', 4, {
    type: 'length',
    length: 4
  }])
})

t.test('an invalid cache salt is refused before it is copied to every sample', async t => {
  const { url, engine } = await routeApp(t)
  for (
    const [path, body, param] of [
      ['/generate', { input_ids: [5], extra_key: 'x'.repeat(1025) }, 'extra_key'],
      ['/generate', { input_ids: [[5]], extra_key: ['x'.repeat(1025)] }, 'extra_key'],
      ['/v1/completions', { prompt: [5], cache_salt: 'x'.repeat(1025) }, 'cache_salt'],
      ['/v1/chat/completions', { messages: [{ role: 'user', content: 'x' }], extra_key: 'x'.repeat(1025) }, 'extra_key']
    ] as const
  ) {
    const { status, text } = await call(url + path, body)
    t.equal(status, 400, path)
    t.match(text, new RegExp(`${param}.*expected at most 1024 characters`))
  }
  t.same(engine.requests, [])
  t.equal(
    (await call(`${url}/generate`, {
      input_ids: [5],
      extra_key: 'x'.repeat(1024),
      sampling_params: { max_new_tokens: 1 }
    }))
      .status,
    200
  )
})

t.test('more ids to score than the vocabulary has tokens are refused', async t => {
  const { url, engine } = await routeApp(t)
  const ids = Array(301).fill(7)
  for (
    const [path, body, param] of [
      ['/generate', {
        input_ids: [5],
        return_logprob: true,
        token_ids_logprob: ids,
        sampling_params: { n: 4, max_new_tokens: 1 }
      }, 'token_ids_logprob'],
      [
        '/inference/v1/generate',
        { token_ids: [5], sampling_params: { logprob_token_ids: ids, max_tokens: 1 } },
        'logprob_token_ids'
      ]
    ] as const
  ) {
    const { status, text } = await call(url + path, body)
    t.equal(status, 400)
    t.match(text, new RegExp(`${param}: expected at most the vocabulary's 300 token ids, got 301`))
  }
  t.same(engine.requests, [])
})
