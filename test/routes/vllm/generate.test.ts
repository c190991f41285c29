import t from 'tap'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import { call, frames, routeApp, until } from '../../helpers/route-app.ts'

const PATH = '/inference/v1/generate'

t.test('tokens go in and come out, with everything that a trainer reads', async t => {
  const { url, engine } = await routeApp(t)
  const { status, json, headers } = await call(url + PATH, {
    token_ids: [5, 6, 7],
    sampling_params: { max_tokens: 4, temperature: 0.5, logprobs: 0 },
    model: 'fake',
    request_id: 'mine',
    priority: 3
  }, {
    method: 'POST',
    headers: { 'content-type': 'application/json', 'x-session-id': 's', 'x-data-parallel-rank': '0' }
  })
  t.equal(status, 200)
  t.equal(headers.get('content-type'), 'application/json')
  const { created, ...rest } = json
  t.ok(Number.isInteger(created))
  const entry = (id: number) => ({ token: `token_id:${id}`, token_id: id, logprob: -id / 100, rank: null })
  t.same(rest, {
    request_id: 'mine',
    model: 'fake',
    output_mode: 'tokens',
    choices: [{
      index: 0,
      finish_reason: 'length',
      stop_reason: null,
      token_ids: [5, 6, 7, 5],
      logprobs: { content: [5, 6, 7, 5].map(id => ({ ...entry(id), top_logprobs: [entry(id)] })) },
      weight_versions: [{ version: 'default', start: 0, end: 4 }],
      routed_experts: null,
      sampling_mask: null
    }],
    usage: { prompt_tokens: 3, completion_tokens: 4, total_tokens: 7, prompt_tokens_details: { cached_tokens: 1 } },
    prompt_logprobs: null,
    prompt_token_ids: null,
    metrics: null,
    kv_transfer_params: null
  })
  t.match(engine.requests[0], {
    rid: 'mine',
    sampling: { temperature: 0.5, maxNewTokens: 4 },
    logprobs: { startLen: null, top: 0, ids: [], raw: false }
  })
})

t.test('every sampling parameter reaches the engine under its own name', async t => {
  const { url, engine } = await routeApp(t)
  await call(url + PATH, {
    token_ids: [97],
    cache_salt: 'policy-3',
    sampling_params: {
      max_tokens: 9,
      min_tokens: 2,
      temperature: 0.25,
      top_p: 0.5,
      top_k: 7,
      min_p: 0.125,
      frequency_penalty: 0.5,
      presence_penalty: -0.5,
      repetition_penalty: 1.5,
      seed: 12,
      stop_token_ids: [8],
      ignore_eos: true,
      logit_bias: { 4: -3 },
      logprobs: 2,
      logprob_token_ids: [3, 4],
      detokenize: false,
      skip_special_tokens: false,
      output_kind: 2,
      extra_args: { x: 1 },
      flat_logprobs: true,
      bad_words: [],
      structured_outputs: null
    }
  })
  t.match(engine.requests[0], {
    cacheSalt: 'policy-3',
    sampling: {
      maxNewTokens: 9,
      minNewTokens: 2,
      temperature: 0.25,
      topP: 0.5,
      topK: 7,
      minP: 0.125,
      frequencyPenalty: 0.5,
      presencePenalty: -0.5,
      repetitionPenalty: 1.5,
      seed: 12n,
      stopTokenIds: [8],
      ignoreEos: true,
      logitBias: [[4, -3]]
    },
    logprobs: { startLen: null, top: 2, ids: [3, 4], raw: false }
  })
  for (const off of [0, -1]) {
    await call(url + PATH, {
      token_ids: [97],
      sampling_params: { top_k: off, max_tokens: 1, seed: '18446744073709551615' }
    })
  }
  t.same(engine.requests.slice(1).map(({ sampling }) => [sampling.topK, sampling.seed]), [[0, 2n ** 64n - 1n], [
    0,
    2n ** 64n - 1n
  ]])
})

t.test('left out or null, max_tokens is what the context leaves; more than that is cut, not refused', async t => {
  const { url, engine } = await routeApp(t, { engine: new FakeEngine({ info: { contextLength: 20 } }) })
  for (const params of [undefined, null, {}, { max_tokens: null }, { max_tokens: 1000, min_tokens: 30 }]) {
    const { json } = await call(url + PATH, {
      token_ids: Array(15).fill(5),
      ...params === undefined ? {} : { sampling_params: params }
    })
    t.equal(json.choices?.[0]?.token_ids.length, 5, JSON.stringify(params))
  }
  t.equal(engine.requests.at(-1)!.sampling.minNewTokens, 5)
  t.match((await call(url + PATH, { token_ids: Array(20).fill(5) })).json.error, { code: 'PROMPT_TOO_LONG' })
  t.equal(
    (await call(url + PATH, { token_ids: Array(20).fill(5), sampling_params: { max_tokens: 0 } })).status,
    200,
    'to be scored only'
  )
})

t.test("finish reasons are vLLM's words", async t => {
  const { url, engine } = await routeApp(t, { engine: new FakeEngine({ stepMs: 2 }) })
  const choice = async (body: object) => (await call(url + PATH, body)).json.choices[0]
  t.match(await choice({ token_ids: [5, 2], sampling_params: { max_tokens: 9 } }), {
    finish_reason: 'stop',
    stop_reason: 2,
    token_ids: [5, 2]
  })
  t.match(await choice({ token_ids: [97, 98, 99], sampling_params: { max_tokens: 9, stop: 'bc' } }), {
    finish_reason: 'stop',
    stop_reason: 'bc',
    token_ids: [97, 98, 99]
  }, 'token ids are all there are')
  t.match(await choice({ token_ids: [5], sampling_params: { max_tokens: 1 } }), {
    finish_reason: 'length',
    stop_reason: null
  })
  const { generationTokens } = engine.stats
  const aborted = choice({ token_ids: [5], sampling_params: { max_tokens: 500 } })
  await until(() => engine.stats.generationTokens > generationTokens)
  await call(`${url}/pause`, {})
  const partial = await aborted
  t.match(partial, { finish_reason: 'abort', stop_reason: null })
  t.ok(partial.token_ids.length > 0 && partial.token_ids.length < 500)
})

t.test('frozen over an update of weights, a sample tells which tokens are of which', async t => {
  const { url, engine } = await routeApp(t, { engine: new FakeEngine({ stepMs: 2 }) })
  const pending = call(url + PATH, { token_ids: [5], sampling_params: { max_tokens: 60, logprobs: 0 } })
  await until(() => engine.stats.generationTokens > 0)
  await call(`${url}/pause?mode=keep&clear_cache=false`, {})
  await call(`${url}/update_weight_version`, { new_version: 'step-2', abort_all_requests: false })
  await call(`${url}/resume`, {})
  const [choice] = (await pending).json.choices
  t.equal(choice.finish_reason, 'length')
  t.equal(choice.token_ids.length, 60)
  t.equal(choice.logprobs.content.length, 60)
  const [first, second, ...others] = choice.weight_versions
  t.same(others, [])
  t.match([first, second], [{ version: 'default', start: 0, end: second.start }, { version: 'step-2', end: 60 }])
  t.ok(second.start > 0 && second.start < 60)
})

t.test('the best tokens stand behind the token itself, each once, with their ranks', async t => {
  const { url } = await routeApp(t)
  const [choice] = (await call(url + PATH, {
    token_ids: [5, 6],
    sampling_params: { max_tokens: 1, logprobs: 2, prompt_logprobs: 1, logprob_token_ids: [5, 9, 6] }
  }))
    .json
    .choices
  t.same(choice.logprobs.content, [{
    token: 'token_id:5',
    token_id: 5,
    logprob: -0.05,
    rank: 1,
    top_logprobs: [
      { token: 'token_id:5', token_id: 5, logprob: -0.05, rank: 1 },
      { token: 'token_id:6', token_id: 6, logprob: -0.06, rank: 2 },
      { token: 'token_id:9', token_id: 9, logprob: -0.09, rank: null }
    ]
  }])
})

t.test("prompts are scored in vLLM's form, apart from outputs", async t => {
  const { url, engine } = await routeApp(t)
  const reply = async (params: object) =>
    (await call(url + PATH, { token_ids: [5, 8, 7], sampling_params: { max_tokens: 1, ...params } })).json
  const one = await reply({ prompt_logprobs: 1 })
  const score = (id: number, rank: number) => ({ logprob: -id / 100, rank, decoded_token: null })
  t.same(one.prompt_logprobs, [null, { 8: score(8, 1) }, { 7: score(7, 1) }])
  t.equal(one.choices[0].logprobs, null, 'not asked for')
  t.match(engine.requests[0]!.logprobs, { startLen: 0, top: 1 })
  const zero = await reply({ prompt_logprobs: 0, logprobs: 2 })
  t.same(zero.prompt_logprobs, [null, { 8: score(8, 1) }, { 7: score(7, 1) }], 'each token by itself')
  t.equal(zero.choices[0].logprobs.content[0].top_logprobs.length, 2)
  const more = await reply({ prompt_logprobs: 3, logprobs: 1 })
  t.same(Object.keys(more.prompt_logprobs[1]), ['8', '9', '10'])
  t.equal(more.choices[0].logprobs.content[0].top_logprobs.length, 1, 'of outputs as many as were asked for')
  const all = await reply({ prompt_logprobs: -1 })
  t.equal(Object.keys(all.prompt_logprobs[1]).length, 300)
  const scored = await reply({ prompt_logprobs: 1, max_tokens: 0 })
  t.match(scored, { choices: [{ token_ids: [], finish_reason: 'length' }], prompt_logprobs: [null, {}, {}] })
})

t.test('a token that is none of the best has the rank after them', async t => {
  const engine = new FakeEngine()
  const original = engine.generate.bind(engine)
  engine.generate = async function* (request) {
    for await (const event of original(request)) {
      yield event.input === null
        ? event
        : {
          ...event,
          input: {
            ...event.input,
            top: event
              .input
              .top
              .map(row => row === null ? null : [[-0.001, 1], [-Infinity, 4]])
          }
        }
    }
  }
  const { url } = await routeApp(t, { engine })
  const { prompt_logprobs: scores } =
    (await call(url + PATH, { token_ids: [5, 8], sampling_params: { max_tokens: 1, prompt_logprobs: 2 } })).json
  t.same(scores[1], {
    1: { logprob: -0.001, rank: 1, decoded_token: null },
    4: { logprob: -9999, rank: 2, decoded_token: null },
    8: { logprob: -0.08, rank: 3, decoded_token: null }
  })
})

t.test('n samples stand beside each other and count their prompt once', async t => {
  const { url, engine } = await routeApp(t)
  const { json } = await call(url + PATH, {
    request_id: 'r',
    token_ids: [5, 6],
    sampling_params: { n: 3, max_tokens: 2, seed: 9 },
    return_token_ids: true
  })
  t.same(json.choices.map((choice: any) => [choice.index, choice.token_ids]), [[0, [5, 6]], [1, [5, 6]], [2, [5, 6]]])
  t.match(json, { usage: { prompt_tokens: 2, completion_tokens: 6 }, prompt_token_ids: [5, 6] })
  t.same(engine.requests.map(({ rid, sampling }) => [rid, sampling.seed]), [['r_0', 9n], ['r_1', 10n], ['r_2', 11n]])
})

t.test('mode text has the text, and logprobs by text', async t => {
  const { url } = await routeApp(t)
  const ask = async (params: object) =>
    (await call(url + PATH, {
      token_ids: [97, 98, 99],
      output_mode: 'text',
      sampling_params: { max_tokens: 3, ...params }
    }))
      .json
  const { output_mode: mode, choices: [choice] } = await ask({ logprobs: 1, stop: 'c' })
  t.equal(mode, 'text')
  t.match(choice, { text: 'ab', token_ids: [97, 98, 99], finish_reason: 'stop', stop_reason: 'c' })
  t.same(choice.logprobs.content[0], {
    token: 'a',
    logprob: -0.97,
    bytes: [97],
    top_logprobs: [{ token: 'a', logprob: -0.97, bytes: [97] }]
  })
  t.equal((await ask({ stop: 'c', include_stop_str_in_output: true })).choices[0].text, 'abc')
  t.match((await ask({ detokenize: false })).error, {
    message: /output_mode: "text" needs "detokenize": true/,
    param: 'output_mode'
  })
  t.same((await ask({ prompt_logprobs: 0 })).prompt_logprobs[1], {
    98: { logprob: -0.98, rank: 1, decoded_token: 'b' }
  })
})

t.test('a stream brings what is new, whole spans at its end, and usage when asked for', async t => {
  const { url } = await routeApp(t)
  const body = {
    request_id: 'r',
    token_ids: [97, 98, 99],
    stream: true,
    return_token_ids: true,
    sampling_params: { max_tokens: 5, n: 2, logprobs: 0 }
  }
  const all = frames((await call(url + PATH, { ...body, stream_options: { include_usage: true } })).text)
  t.equal(all.at(-1), '[DONE]')
  t.match(all.at(-2), { request_id: 'r', choices: [], usage: { prompt_tokens: 3, completion_tokens: 10 } })
  const chunks = all.slice(0, -2)
  t.ok(chunks.length > 2)
  t.same(chunks.map(chunk => chunk.prompt_token_ids).filter(Boolean), [[97, 98, 99]], 'once')
  for (const index of [0, 1]) {
    const own = chunks.flatMap(chunk => chunk.choices).filter((choice: any) => choice.index === index)
    t.same(own.flatMap((choice: any) => choice.token_ids), [97, 98, 99, 97, 98])
    t.same(own.flatMap((choice: any) => choice.logprobs.content.map((entry: any) => entry.token_id)), [
      97,
      98,
      99,
      97,
      98
    ])
    t.same(own.flatMap((choice: any) => choice.weight_versions ?? []), [{ version: 'default', start: 0, end: 5 }])
    t.same(own.map((choice: any) => choice.finish_reason).filter(Boolean), ['length'])
  }
  const text = frames((await call(url + PATH, { ...body, output_mode: 'text' })).text)
    .slice(0, -1)
    .flatMap(chunk => chunk.choices)
    .filter((choice: any) => choice.index === 0)
  t.equal(text.map((choice: any) => choice.text).join(''), 'abcab')
  t.match(
    (await call(url + PATH, { ...body, sampling_params: { prompt_logprobs: 1 } })).json.error.message,
    /prompt_logprobs: is not possible in a stream/
  )
})

t.test("what this server has not got is refused by name, in OpenAI's form", async t => {
  const { url, engine } = await routeApp(t)
  for (
    const [fields, param] of [
      [{ features: { mm_hashes: {}, mm_placeholders: {} } }, 'features'],
      [{ content_parts: [{ type: 'image_url' }] }, 'content_parts'],
      [{ kv_transfer_params: { do_remote_decode: true } }, 'kv_transfer_params'],
      [{ return_routed_experts: true }, 'return_routed_experts'],
      [{ return_full_logprobs: true }, 'return_full_logprobs'],
      [{ sampling_params: { bad_words: ['x'] } }, 'sampling_params.bad_words'],
      [{ sampling_params: { structured_outputs: { regex: 'a' } } }, 'sampling_params.structured_outputs'],
      [{ sampling_params: { allowed_token_ids: [1] } }, 'sampling_params.allowed_token_ids'],
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

t.test('bad values are refused with the field, what was expected and what came', async t => {
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
      [{ token_ids: [5], model: 'fake:adapter' }, /model: LoRA adapters are not supported/],
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
      [{ token_ids: [5], sampling_params: { seed: 2 ** 60 } }, /seed \d+ is too large for a JSON number/],
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

t.test('an id under way is not taken twice', async t => {
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

t.test('without a tokenizer tokens still go in and out', async t => {
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

t.test("SkyRL's own route answers alike, but for mixtures of experts, whose routes are not recorded", async t => {
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

t.test('dialects that are not chosen have no routes', async t => {
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
