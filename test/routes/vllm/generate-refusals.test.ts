import t from 'tap'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import { call, routeApp, until } from '../../helpers/route-app.ts'

const PATH = '/inference/v1/generate'

t.test("a field that this server does not support is refused by name, in OpenAI's form", async t => {
  const { url, engine } = await routeApp(t)
  for (
    const [fields, param] of [
      [{ features: { mm_hashes: {}, mm_placeholders: {} } }, 'features'],
      [{ content_parts: [{ type: 'image_url' }] }, 'content_parts'],
      [{ kv_transfer_params: { do_remote_decode: true } }, 'kv_transfer_params'],
      [{ return_routed_experts: true }, 'return_routed_experts'],
      [{ return_full_logprobs: true }, 'return_full_logprobs'],
      [{ sampling_params: { repetition_detection: { max: 2 } } }, 'sampling_params.repetition_detection'],
      [{ sampling_params: { truncate_prompt_tokens: 4 } }, 'sampling_params.truncate_prompt_tokens']
    ] as const
  ) {
    const { status, json } = await call(url + PATH, { token_ids: [5], ...fields })
    t.equal(status, 400, param)
    t.match(json.error, { code: 'UNSUPPORTED', param, message: /not supported by this server/ })
  }
  for (
    const fields of [{
      features: null,
      kv_transfer_params: null,
      content_parts: null,
      cache_salt: null,
      sampling_params: { max_tokens: 1, bad_words: null }
    }]
  ) t.equal((await call(url + PATH, { token_ids: [5], ...fields })).status, 200)
  t.equal(engine.requests.length, 1)
})

t.test('a bad value is refused with the field, the expected value and the received value', async t => {
  const { url, engine } = await routeApp(t, { maxBatch: 8 })
  for (
    const [body, message] of [
      [{}, /token_ids: is required/],
      [{ token_ids: [] }, /token_ids: expected at least 1 item, got 0/],
      [{ token_ids: [-1] }, /token_ids\[0\] is -1; expected a token id from 0 to 299/],
      [{ token_ids: [300] }, /token_ids\[0\] is 300/],
      [{ token_ids: [1.5] }, /token_ids\[0\]: expected an integer/],
      [{ token_ids: 'abc' }, /token_ids: expected an array/],
      [{ token_ids: [[5]] }, /token_ids/],
      [{ token_ids: [5], cache_salt: '' }, /cache_salt/],
      [{ token_ids: [5], cache_salt: 'x'.repeat(1025) }, /cache_salt: expected at most 1024 characters/],
      [{ token_ids: [5], request_id: '' }, /request_id/],
      [{ token_ids: [5], output_mode: 'json' }, /output_mode/],
      [{ token_ids: [5], model: 'fake:adapter' }, /model: LoRA adapters are not enabled/],
      [{ token_ids: [5], sampling_params: { temperature: -1 } }, /temperature must be non-negative/],
      [{ token_ids: [5], sampling_params: { top_p: 0 } }, /top_p must be in \(0, 1\]/],
      [{ token_ids: [5], sampling_params: { top_k: -2 } }, /top_k/],
      [
        { token_ids: [5], sampling_params: { min_tokens: 5, max_tokens: 4 } },
        /min_tokens must be in \[0, max_tokens\(4\)\], got 5/
      ],
      [{ token_ids: [5], sampling_params: { max_tokens: -1 } }, /max_tokens/],
      [{ token_ids: [5], sampling_params: { logprobs: -2 } }, /logprobs/],
      [{ token_ids: [5], sampling_params: { logprobs: 1025 } }, /logprobs/],
      [
        { token_ids: [5], sampling_params: { logprob_token_ids: [300] } },
        /logprob_token_ids: expected token ids from 0 to 299, got 300/
      ],
      [{ token_ids: [5], sampling_params: { logit_bias: { 300: 1 } } }, /logit_bias must have keys/],
      [{ token_ids: [5], sampling_params: { seed: -(2 ** 64) } }, /seed -\d+ has more than 64 bits/],
      [
        { token_ids: [5], sampling_params: { stop: 'x', detokenize: false } },
        /stop: stop texts need "detokenize": true/
      ],
      [{ token_ids: [5], sampling_params: { n: 9 } }, /sampling_params.n: expected at most 8 samples/],
      [{ token_ids: [5], sampling_params: { n: 0 } }, /n: expected a number >= 1/]
    ] as const
  ) {
    const { status, json } = await call(url + PATH, body)
    t.equal(status, 400, JSON.stringify(body))
    t.match(json.error.message, message)
    t.notMatch(json.error.message, /new_tokens|sampling_seed/)
  }
  t.same(engine.requests, [])
})

t.test('a request id that is in use is refused', async t => {
  const { url, engine } = await routeApp(t, { engine: new FakeEngine({ stepMs: 2 }) })
  const first = call(url + PATH, { request_id: 'a', token_ids: [5], sampling_params: { max_tokens: 200 } })
  await until(() => engine.live === 1)
  t.match(
    (await call(url + PATH, { request_id: 'a', token_ids: [5] })).json.error.message,
    /Duplicate request ID detected: a/
  )
  await call(`${url}/abort_requests`, { request_ids: ['a'] })
  t.equal((await first).json.choices[0].finish_reason, 'abort')
})

t.test('a server without a tokenizer generates token ids and refuses texts', async t => {
  const { url } = await routeApp(t, { tokenizer: null })
  t.equal(
    (await call(url + PATH, { token_ids: [5], sampling_params: { max_tokens: 1, logprobs: 1 } }))
      .json
      .choices[0]
      .logprobs
      .content[0]
      .token,
    'token_id:5'
  )
  t.match((await call(url + PATH, { token_ids: [5], output_mode: 'text' })).json.error, {
    code: 'UNSUPPORTED',
    param: 'output_mode'
  })
  t.match((await call(url + PATH, { token_ids: [5], sampling_params: { stop: 'x' } })).json.error, {
    code: 'UNSUPPORTED',
    param: 'sampling_params.stop'
  })
})

t.test("SkyRL's own route gives the same replies, and refuses mixtures of experts", async t => {
  const dense = await routeApp(t)
  const { json } = await call(`${dense.url}/skyrl/v1/generate`, {
    token_ids: [5],
    sampling_params: { max_tokens: 2, logprobs: 1 },
    model: 'm'
  })
  t.match(json.choices[0], {
    token_ids: [5, 5],
    finish_reason: 'length',
    routed_experts: null,
    logprobs: { content: [{ logprob: -0.05 }, { logprob: -0.05 }] }
  })
  const moe = await routeApp(t, { engine: new FakeEngine({ info: { architecture: 'Qwen3MoeForCausalLM' } }) })
  const refused = await call(`${moe.url}/skyrl/v1/generate`, { token_ids: [5] })
  t.equal(refused.status, 400)
  t.match(refused.json.error, {
    code: 'UNSUPPORTED',
    message: /routed experts are not recorded by this engine.*enable_return_routed_experts/
  })
  t.equal((await call(moe.url + PATH, { token_ids: [5], sampling_params: { max_tokens: 1 } })).status, 200)
})

t.test('a dialect that is not chosen has no routes', async t => {
  const { url } = await routeApp(t, { dialects: ['trl'] })
  t.equal((await call(`${url}/skyrl/v1/generate`, { token_ids: [5] })).status, 404)
  t.equal(
    (await call(url + PATH, { token_ids: [5], sampling_params: { max_tokens: 1 } })).status,
    200,
    "TRL speaks vLLM's, too"
  )
  const none = await routeApp(t, { dialects: ['checkpoint-engine'] })
  for (const path of [PATH, '/pause', '/sleep', '/generate/']) {
    t.equal((await call(none.url + path, {})).status, 404, path)
  }
})
