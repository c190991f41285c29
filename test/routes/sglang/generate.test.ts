import t from 'tap'
import { call, frames, routeApp, until } from '../../helpers/route-app.ts'
import { FakeEngine } from '../../helpers/fake-engine.ts'

t.test("text in, SGLang's whole reply out", async t => {
  const { url, engine } = await routeApp(t)
  const reply = await call(`${url}/generate`, {
    text: 'hello',
    sampling_params: { max_new_tokens: 3, temperature: 0 },
    rid: 'r1'
  })
  t.equal(reply.status, 200)
  const { meta_info: { e2e_latency: latency, response_sent_to_client_ts: sentAt, ...meta }, ...rest } = reply.json
  t.same(rest, { text: 'hel', output_ids: [104, 101, 108] })
  t.same(meta, {
    id: 'r1',
    finish_reason: { type: 'length', length: 3 },
    prompt_tokens: 5,
    weight_version: 'default',
    weight_versions: [{ version: 'default', start: 0, end: 3 }],
    num_retractions: 0,
    reasoning_tokens: 0,
    completion_tokens: 3,
    cached_tokens: 3,
    seed: '4242'
  })
  t.ok(latency >= 0 && sentAt > 1e9)
  t.equal(reply.headers.get('content-type'), 'application/json')
  t.equal(engine.live, 0)
})

t.test('PUT is POST', async t => {
  const { url } = await routeApp(t)
  const reply = await call(`${url}/generate`, { input_ids: [5, 6], sampling_params: { max_new_tokens: 2 } }, {
    method: 'PUT'
  })
  t.same(reply.json.output_ids, [5, 6])
})

t.test('null and absent sampling parameters are defaults, and max_new_tokens null is what the context leaves', async t => {
  const { url, engine } = await routeApp(t)
  await call(`${url}/generate`, {
    input_ids: [5, 2],
    sampling_params: {
      max_new_tokens: null,
      temperature: null,
      top_p: null,
      top_k: null,
      min_p: null,
      stop: null,
      stop_token_ids: null,
      n: null,
      logit_bias: null,
      sampling_seed: null,
      skip_special_tokens: null
    }
  })
  await call(`${url}/generate`, {
    input_ids: [5, 2],
    sampling_params: null,
    stream: null,
    rid: null,
    return_logprob: null,
    image_data: null,
    lora_path: null
  })
  await call(`${url}/generate`, { input_ids: Array(500).fill(5).concat(2) })
  const [first, second, third] = engine.requests.map(request => request.sampling)
  t.same(first, {
    maxNewTokens: 510,
    minNewTokens: 0,
    temperature: 1,
    topP: 1,
    topK: 0,
    minP: 0,
    frequencyPenalty: 0,
    presencePenalty: 0,
    repetitionPenalty: 1,
    stopTokenIds: [],
    ignoreEos: false,
    logitBias: [],
    seed: null
  })
  t.equal(second!.maxNewTokens, 128)
  t.equal(third!.maxNewTokens, 11, 'the default does not run past the context')
})

t.test('sampling parameters reach the engine as they were sent', async t => {
  const { url, engine } = await routeApp(t)
  await call(`${url}/generate`, {
    input_ids: [5, 2],
    extra_key: 'salt',
    sampling_params: {
      max_new_tokens: '7',
      min_new_tokens: 1,
      temperature: '0.5',
      top_p: 0.9,
      top_k: 40,
      min_p: 0.1,
      frequency_penalty: -2,
      presence_penalty: 2,
      repetition_penalty: 1.5,
      stop_token_ids: [9],
      ignore_eos: 'true',
      logit_bias: { 7: -3.5, 299: 1 },
      sampling_seed: '18446744073709551615'
    }
  })
  t.match(engine.requests[0]!.sampling, {
    maxNewTokens: 7,
    minNewTokens: 1,
    temperature: 0.5,
    topP: 0.9,
    topK: 40,
    minP: 0.1,
    frequencyPenalty: -2,
    presencePenalty: 2,
    repetitionPenalty: 1.5,
    stopTokenIds: [9],
    ignoreEos: true,
    seed: 18446744073709551615n
  })
  t.same(engine.requests[0]!.sampling.logitBias, [[7, -3.5], [299, 1]])
  t.equal(engine.requests[0]!.cacheSalt, 'salt')
})

t.test('temperatures too small to divide by are greedy, and a top_k of the vocabulary is off', async t => {
  const { url, engine } = await routeApp(t)
  await call(`${url}/generate`, { input_ids: [5, 2], sampling_params: { temperature: 1e-7, top_k: 300 } })
  t.match(engine.requests[0]!.sampling, { temperature: 0, topK: 0 })
})

t.test("refusals of values have SGLang's texts", async t => {
  const { url, engine } = await routeApp(t)
  const cases: [object, string][] = [
    [{ temperature: -1 }, 'temperature must be non-negative, got -1.'],
    [{ temperature: 1e39 }, 'temperature must be a finite float32, got 1e+39.'],
    [{ top_p: 0 }, 'top_p must be in (0, 1], got 0.'],
    [{ top_p: 1e-46 }, 'top_p must be in (0, 1], got 1e-46.'],
    [{ top_p: 1.5 }, 'top_p must be in (0, 1], got 1.5.'],
    [{ min_p: 2 }, 'min_p must be in [0, 1], got 2.'],
    [{ top_k: 0 }, 'top_k must be -1 (disable) or at least 1, got 0.'],
    [{ top_k: -2 }, 'top_k must be -1 (disable) or at least 1, got -2.'],
    [{ frequency_penalty: 3 }, 'frequency_penalty must be in [-2, 2], got 3.'],
    [{ presence_penalty: -3 }, 'presence_penalty must be in [-2, 2], got -3.'],
    [{ repetition_penalty: 0 }, 'repetition_penalty must be in [0.000001, 2], got 0.'],
    [{ repetition_penalty: 1e-40 }, 'repetition_penalty must be in [0.000001, 2], got 1e-40.'],
    [{ repetition_penalty: 1e39 }, 'repetition_penalty must be in [0.000001, 2], got 1e+39.'],
    [{ max_new_tokens: -1 }, 'max_new_tokens must be at least 0, got -1.'],
    [{ min_new_tokens: -1 }, 'min_new_tokens must be in [0, max_new_tokens], got -1.'],
    [{ min_new_tokens: 5, max_new_tokens: 4 }, 'min_new_tokens must be in [0, max_new_tokens(4)], got 5.'],
    [{ logit_bias: { 300: 1 } }, 'logit_bias must have keys in [0, 299], got 300.'],
    [{ logit_bias: { x: 1 } }, 'logit_bias must have keys in [0, 299], got x.'],
    [{ logit_bias: { 7: 1e39 } }, 'logit_bias must have finite float32 values, got 1e+39 for 7.'],
    [{ logit_bias: { 8: -1e39 } }, 'logit_bias must have finite float32 values, got -1e+39 for 8.'],
    [{ stop_token_ids: [300] }, 'stop_token_ids must be in [0, 299].']
  ]
  for (const [params, message] of cases) {
    const reply = await call(`${url}/generate`, { input_ids: [5], sampling_params: params })
    t.equal(reply.status, 400, message)
    t.equal(reply.json.error.message, message)
    t.equal(reply.json.message, message)
    t.equal(reply.json.error.code, 'INVALID_REQUEST')
    t.equal(reply.json.param, `sampling_params.${Object.keys(params)[0]}`)
  }
  t.equal(engine.requests.length, 0)
})

t.test('refusals of types name the field, the expected and the received type', async t => {
  const { url } = await routeApp(t)
  const cases: [object, string][] = [
    [{ input_ids: [5, 'x'] }, 'input_ids[1]: expected an integer, got "x"'],
    [{ input_ids: [[5], [6, 1.5]] }, 'input_ids[1][1]: expected an integer, got 1.5'],
    [{ input_ids: [[5], 6] }, 'input_ids[1]: expected an array of integers, got 6'],
    [{ text: 5 }, 'text: expected a string, an array of strings or null, got 5'],
    [{ input_ids: [5], stream: 'maybe' }, 'stream: expected true or false or null, got "maybe"'],
    [
      { input_ids: [5], sampling_params: { temperature: 'hot' } },
      'sampling_params.temperature: expected a finite number or null, got "hot"'
    ],
    [{ input_ids: [5], sampling_params: [] }, 'sampling_params: expected one entry for each of the 1 prompts, got 0'],
    [{ input_ids: [5], sampling_params: 7 }, 'sampling_params: expected an object, an array of objects or null, got 7'],
    [{ input_ids: [5], rid: '' }, 'rid: must not be empty']
  ]
  for (const [body, message] of cases) {
    const reply = await call(`${url}/generate`, body)
    t.equal(reply.status, 400, message)
    t.equal(reply.json.message, message)
  }
})

t.test('an unknown sampling parameter is refused by name', async t => {
  const { url } = await routeApp(t)
  const reply = await call(`${url}/generate`, { input_ids: [5], sampling_params: { temprature: 1 } })
  t.equal(reply.status, 400)
  t.match(reply.json.message, /^sampling_params\.temprature: unknown field; known are max_new_tokens, /)
  t.equal(reply.json.param, 'sampling_params.temprature')
})

t.test('numbers that overflow are refused', async t => {
  const { url } = await routeApp(t)
  const send = async (text: string) =>
    await call(`${url}/generate`, undefined, {
      method: 'POST',
      body: text,
      headers: { 'content-type': 'application/json' }
    })
  for (const number of ['1e999', '-1e999']) {
    const reply = await send(`{"input_ids":[5],"sampling_params":{"temperature":${number}}}`)
    t.equal(reply.status, 400)
    t.match(reply.json.message, /sampling_params\.temperature: expected a finite number/)
  }
  t.match((await send('{"input_ids":[1e999]}')).json.message, /input_ids\[0\]: expected an integer/)
  t.match(
    (await send('{"input_ids":[5],"sampling_params":{"max_new_tokens":1e300}}')).json.message,
    /Requested token count exceeds/
  )
  t.match(
    (await send('{"input_ids":[99999999999999999999]}')).json.message,
    /input_ids\[0\] is 100000000000000000000; expected a token id from 0 to 299/
  )
  t.match(
    (await send('{"input_ids":[5],"sampling_params":{"sampling_seed":99999999999999999999}}')).json.message,
    /sampling_seed .* send it as a string/
  )
  t.match(
    (await send('{"input_ids":[5],"sampling_params":{"temperature":NaN}}')).json.message,
    /not valid JSON .*NaN and Infinity are no JSON/
  )
  t.match((await send('{"input_ids":[5],"sampling_params":{"n":1e300}}')).json.message, /at most 512 samples/)
})

t.test('impossible prompts are refused with the field', async t => {
  const { url } = await routeApp(t)
  const cases: [object, RegExp, string][] = [
    [{}, /^Either text, input_ids or input_embeds should be provided\.$/, 'text'],
    [{ text: 'a', input_ids: [1] }, /^Either text, input_ids or input_embeds should be provided\. Both/, 'text'],
    [{ input_ids: [] }, /^input_ids cannot be empty\.$/, 'input_ids'],
    [{ input_ids: [[1], []] }, /^input_ids\[1\] cannot be empty\.$/, 'input_ids[1]'],
    [{ text: '' }, /^text has no tokens/, 'text'],
    [{ text: [] }, /^text: cannot be an empty batch$/, 'text'],
    [{ text: ['a', ''] }, /^text\[1\] has no tokens/, 'text[1]'],
    [{ input_ids: [1, 300] }, /^input_ids\[1\] is 300; expected a token id from 0 to 299$/, 'input_ids[1]'],
    [{ input_ids: [[1], [-1]] }, /^input_ids\[1\]\[0\] is -1; expected/, 'input_ids[1][0]'],
    [
      { input_ids: Array(512).fill(1) },
      /^The input \(512 tokens\) is longer than the model's context length \(512 tokens\)\.$/,
      'input_ids'
    ],
    [
      { input_ids: Array(500).fill(1), sampling_params: { max_new_tokens: 13 } },
      /^Requested token count exceeds the model's maximum context length of 512 tokens\. You requested a total of 513 tokens: 500 tokens from the input messages and 13 tokens for the completion\./,
      'input_ids'
    ],
    [
      { input_ids: Array(600).fill([1]) },
      /at most 512 samples in one request, got 600 prompts with n = 1/,
      'input_ids'
    ],
    [{ input_ids: [1], sampling_params: { n: 600 } }, /at most 512 samples/, 'sampling_params.n'],
    [
      { input_ids: [1], logprob_start_len: 2, return_logprob: true },
      /logprob_start_len: 2 is higher than the number of input tokens 1/,
      'logprob_start_len'
    ],
    [
      { input_ids: [1], top_logprobs_num: 301, return_logprob: true },
      /top_logprobs_num: expected at most 300/,
      'top_logprobs_num'
    ],
    [
      { input_ids: [1], token_ids_logprob: [300], return_logprob: true },
      /token_ids_logprob: expected token ids from 0 to 299, got 300/,
      'token_ids_logprob'
    ],
    [{ input_ids: [[1], [2]], rid: ['a'] }, /rid: expected one entry for each of the 2 prompts, got 1/, 'rid'],
    [{ input_ids: [[1], [2]], sampling_params: [{ n: 1 }, { n: 2 }] }, /n must be the same/, 'sampling_params']
  ]
  for (const [body, message, param] of cases) {
    const reply = await call(`${url}/generate`, body)
    t.equal(reply.status, 400)
    t.match(reply.json.message, message)
    t.equal(reply.json.param, param)
  }
})

t.test('a prompt that fills the context can be scored', async t => {
  const { url } = await routeApp(t)
  const reply = await call(`${url}/generate`, {
    input_ids: Array(512).fill(1),
    return_logprob: true,
    logprob_start_len: 0,
    sampling_params: { max_new_tokens: 0 }
  })
  t.equal(reply.status, 200)
  t.equal(reply.json.meta_info.input_token_logprobs.length, 512)
  t.same(reply.json.output_ids, [])
})

t.test('unsupported features are refused only if they are requested', async t => {
  const { url } = await routeApp(t)
  for (
    const [field, value] of Object.entries({
      image_data: 'x',
      lora_path: 'a',
      session_params: { id: 1 },
      return_routed_experts: true,
      return_hidden_states: true,
      input_embeds: [[1]],
      custom_logit_processor: 'p'
    })
  ) {
    const reply = await call(`${url}/generate`, { input_ids: [5], [field]: value })
    t.equal(reply.status, 400)
    t.match(reply.json.message, new RegExp(`^${field}: .* not supported by this server`))
    t.equal(reply.json.error.code, 'UNSUPPORTED')
  }
  for (const [field, value] of Object.entries({ json_schema: '{}', regex: 'a', ebnf: 'b', custom_params: { a: 1 } })) {
    t.match(
      (await call(`${url}/generate`, { input_ids: [5], sampling_params: { [field]: value } })).json.message,
      new RegExp(`^sampling_params\\.${field}: .* not supported`)
    )
  }
  const unset = {
    image_data: null,
    lora_path: '',
    session_params: {},
    return_routed_experts: false,
    input_embeds: [],
    return_hidden_states: false
  }
  t.equal(
    (await call(`${url}/generate`, {
      input_ids: [5],
      ...unset,
      sampling_params: { max_new_tokens: 1, json_schema: null, regex: '', custom_params: {} }
    }))
      .status,
    200
  )
})

t.test('outputs of a batch with n samples come in order, the n of a prompt side by side', async t => {
  const { url, engine } = await routeApp(t)
  const reply = await call(`${url}/generate`, {
    text: ['ab', 'cd'],
    rid: 'job',
    sampling_params: { n: 2, max_new_tokens: 2, sampling_seed: 7 }
  })
  t.same(reply.json.map((output: any) => output.text), ['ab', 'ab', 'cd', 'cd'])
  t.same(reply.json.map((output: any) => output.meta_info.id), ['job_0_0', 'job_0_1', 'job_1_0', 'job_1_1'])
  t.same(engine.requests.map(request => request.sampling.seed), [7n, 8n, 7n, 8n])
  const one = await call(`${url}/generate`, { text: ['ab'], sampling_params: { max_new_tokens: 1 } })
  t.ok(Array.isArray(one.json), 'a batch of one is a list')
  const perPrompt = await call(`${url}/generate`, {
    input_ids: [[5], [6]],
    rid: ['x', null],
    return_logprob: [true, false],
    sampling_params: [{ max_new_tokens: 1 }, { max_new_tokens: 2 }]
  })
  t.same(perPrompt.json.map((output: any) => output.output_ids), [[5], [6, 6]])
  t.equal(perPrompt.json[0].meta_info.id, 'x')
  t.match(perPrompt.json[1].meta_info.id, /^[0-9a-f]{32}$/)
  t.same(perPrompt.json.map((output: any) => 'output_token_logprobs' in output.meta_info), [true, false])
})

t.test("logprobs have SGLang's form", async t => {
  const { url } = await routeApp(t)
  const body = {
    input_ids: [97, 98, 99],
    return_logprob: true,
    logprob_start_len: 0,
    top_logprobs_num: 2,
    token_ids_logprob: [65],
    sampling_params: { max_new_tokens: 2 }
  }
  const { meta_info: meta } = (await call(`${url}/generate`, { ...body, return_text_in_logprobs: true })).json
  t.same(meta.input_token_logprobs, [[null, 97, 'a'], [-0.98, 98, 'b'], [-0.99, 99, 'c']])
  t.same(meta.output_token_logprobs, [[-0.97, 97, 'a'], [-0.98, 98, 'b']])
  t.equal(meta.output_token_logprobs_length, 2)
  t.same(meta.input_top_logprobs, [null, [[-0.98, 98, 'b'], [-0.99, 99, 'c']], [[-0.99, 99, 'c'], [-1, 100, 'd']]])
  t.same(meta.output_top_logprobs[0], [[-0.97, 97, 'a'], [-0.98, 98, 'b']])
  t.same(meta.input_token_ids_logprobs, [null, [[-0.65, 65, 'A']], [[-0.65, 65, 'A']]])
  t.same(meta.output_token_ids_logprobs, [[[-0.65, 65, 'A']], [[-0.65, 65, 'A']]])
  const plain =
    (await call(`${url}/generate`, { input_ids: [97], return_logprob: true, sampling_params: { max_new_tokens: 1 } }))
      .json
      .meta_info
  t.same(plain.output_token_logprobs, [[-0.97, 97, null]])
  t.same(plain.input_token_logprobs, [])
  t.notOk('output_top_logprobs' in plain)
})

t.test('return_prompt_token_ids sends the prompt back', async t => {
  const { url } = await routeApp(t)
  const reply = await call(`${url}/generate`, {
    text: 'ab',
    return_prompt_token_ids: true,
    sampling_params: { max_new_tokens: 1 }
  })
  t.same(reply.json.prompt_token_ids, [97, 98])
})

t.test('without a tokenizer ids work and text is refused with the reason', async t => {
  const { url } = await routeApp(t, { tokenizer: null })
  const reply = await call(`${url}/generate`, {
    input_ids: [5],
    return_logprob: true,
    return_text_in_logprobs: true,
    sampling_params: { max_new_tokens: 1 }
  })
  t.notOk('text' in reply.json)
  t.same(reply.json.meta_info.output_token_logprobs, [[-0.05, 5, null]])
  t.match((await call(`${url}/generate`, { text: 'a' })).json, {
    message: /text: this server has no tokenizer .* send token ids/,
    error: { code: 'UNSUPPORTED' }
  })
  t.match(
    (await call(`${url}/generate`, { input_ids: [5], sampling_params: { stop: 'x' } })).json.message,
    /sampling_params\.stop: this server has no tokenizer/
  )
})

t.test('tokens carry the label of the weights that made them, span by span', async t => {
  const engine = new FakeEngine({ stepMs: 2 })
  const { url } = await routeApp(t, { engine })
  const pending = call(`${url}/generate`, { input_ids: [5], rid: 'span', sampling_params: { max_new_tokens: 40 } })
  await until(() => engine.stats.generationTokens >= 5)
  engine.setWeightVersion('v2')
  const { meta_info: meta } = (await pending).json
  t.equal(meta.weight_version, 'v2')
  t.equal(meta.weight_versions.length, 2)
  t.match(meta.weight_versions, [{ version: 'default', start: 0 }, { version: 'v2', end: 40 }])
  t.equal(meta.weight_versions[0].end, meta.weight_versions[1].start)
})

t.test('streams carry everything so far and end with the mark', async t => {
  const { url } = await routeApp(t)
  const reply = await call(`${url}/generate`, {
    text: 'abcd',
    stream: true,
    return_logprob: true,
    sampling_params: { max_new_tokens: 4 }
  })
  t.equal(reply.status, 200)
  t.equal(reply.headers.get('content-type'), 'text/event-stream; charset=utf-8')
  const all = frames(reply.text)
  t.equal(all.at(-1), '[DONE]')
  const events = all.slice(0, -1)
  t.same(events.at(-1).output_ids, [97, 98, 99, 100])
  for (const [i, event] of events.entries()) {
    t.equal(event.text, 'abcd'.slice(0, event.output_ids.length))
    t.equal(event.meta_info.output_token_logprobs.length, event.output_ids.length)
    t.equal(event.meta_info.finish_reason === null, i < events.length - 1)
    t.notOk('index' in event)
  }
})

t.test('streams of a batch carry the index', async t => {
  const { url } = await routeApp(t)
  const events = frames(
    (await call(`${url}/generate`, { text: ['ab', 'cd'], stream: true, sampling_params: { max_new_tokens: 2 } })).text
  )
    .slice(0, -1)
  const ends = events.filter(event => event.meta_info.finish_reason !== null)
  t.same(Object.fromEntries(ends.map(event => [event.index, event.text])), { 0: 'ab', 1: 'cd' })
})

t.test('stream_interval thins a stream out', async t => {
  const { url } = await routeApp(t, { engine: new FakeEngine({ stepMs: 1 }) })
  const events = frames(
    (await call(`${url}/generate`, {
      input_ids: [5],
      stream: true,
      sampling_params: { max_new_tokens: 10, stream_interval: 4 }
    }))
      .text
  )
    .slice(0, -1)
  t.same(events.map(event => event.output_ids.length), [4, 8, 10])
})

t.test('a stream that is refused before its first token has a status', async t => {
  const engine = new FakeEngine({ info: { maxRunningRequests: 1, maxQueuedRequests: 0 }, stepMs: 5 })
  const { url } = await routeApp(t, { engine })
  const pending = call(`${url}/generate`, { input_ids: [5], rid: 'first', sampling_params: { max_new_tokens: 500 } })
  await until(() => engine.live === 1)
  const reply = await call(`${url}/generate`, { input_ids: [5], stream: true })
  t.equal(reply.status, 503)
  t.equal(reply.headers.get('retry-after'), '1')
  t.equal(reply.json.error.code, 'QUEUE_FULL')
  await call(`${url}/abort_request`, { rid: 'first' })
  t.equal((await pending).json.meta_info.finish_reason.type, 'abort')
})

t.test('a stream that breaks later says so in an event, then ends', async t => {
  const engine = new FakeEngine({ stepMs: 2 })
  const { url } = await routeApp(t, { engine })
  const pending = call(`${url}/generate`, { input_ids: [5], stream: true, sampling_params: { max_new_tokens: 500 } })
  await until(() => engine.stats.generationTokens > 3)
  engine.weights = { state: 'torn', tensors: ['x'], reason: 'a read failed' }
  const reply = await pending
  t.equal(reply.status, 200)
  const all = frames(reply.text)
  t.equal(all.at(-1), '[DONE]')
  t.match(all.at(-2), { error: { message: 'a read failed', code: 503, refit_code: 'ENGINE_TORN', retryable: true } })
})

t.test('torn weights answer 503 with the reason, some of the tensors and the remedy', async t => {
  const engine = new FakeEngine()
  engine.weights = { state: 'torn', tensors: ['v', 'w', 'x', 'y', 'z'], reason: 'a read failed' }
  const { url } = await routeApp(t, { engine })
  const reply = await call(`${url}/generate`, { input_ids: [5] })
  t.equal(reply.status, 503)
  t.match(reply.json, {
    error: {
      code: 'ENGINE_TORN',
      message: 'weights are torn (a read failed): v, w, x and 2 more; write them again with any weight update'
    }
  })
  t.equal(reply.headers.get('retry-after'), '1')
})

t.test('request ids that are taken are refused, also inside one batch', async t => {
  const engine = new FakeEngine({ stepMs: 5 })
  const { url } = await routeApp(t, { engine })
  const pending = call(`${url}/generate`, { input_ids: [5], rid: 'same', sampling_params: { max_new_tokens: 500 } })
  await until(() => engine.live === 1)
  const reply = await call(`${url}/generate`, { input_ids: [5], rid: 'same' })
  t.equal(reply.status, 400)
  t.match(reply.json, { message: 'Duplicate request ID detected: same', param: 'rid' })
  t.match(
    (await call(`${url}/generate`, { input_ids: [[5], [6]], rid: ['x', 'x'] })).json.message,
    /Duplicate request ID detected: x/
  )
  t.equal(engine.live, 1)
  await call(`${url}/abort_request`, { rid: 'same' })
  const { meta_info: meta } = (await pending).json
  t.same(meta.finish_reason, { type: 'abort', message: 'Aborted', status_code: null, err_type: null })
  t.ok(meta.completion_tokens > 0, 'with what it had')
  t.equal(
    (await call(`${url}/generate`, { input_ids: [5], rid: 'same', sampling_params: { max_new_tokens: 1 } })).status,
    200,
    'the id is free again'
  )
})

t.test('abort reaches all samples behind a name, or all names with a prefix', async t => {
  const engine = new FakeEngine({ stepMs: 5 })
  const { url } = await routeApp(t, { engine })
  const start = async (rid: string) =>
    await call(`${url}/generate`, { input_ids: [[5], [6]], rid, sampling_params: { n: 2, max_new_tokens: 500 } })
  const [first, second, third] = [start('job'), start('other-1'), start('other-2')]
  await until(() => engine.live === 12)
  await call(`${url}/abort_request`, { rid: 'jo' })
  t.equal(engine.calls.length, 0, 'part of a name is no name')
  await call(`${url}/abort_request`, { rid: 'job' })
  t.same((await first).json.map((output: any) => output.meta_info.finish_reason.type), Array(4).fill('abort'))
  t.equal(engine.live, 8)
  await call(`${url}/abort_request`, { rid: 'other', prefix: true })
  await Promise.all([second, third])
  t.equal(engine.live, 0)
})

t.test('stop texts end the text before them, or after them on request, also across events of a stream', async t => {
  const { url } = await routeApp(t)
  const body = { text: 'abcdef', sampling_params: { stop: ['cd', 'zz', ''], max_new_tokens: 50 } }
  const { text, output_ids: ids, meta_info: meta } = (await call(`${url}/generate`, body)).json
  t.equal(text, 'ab')
  t.equal(ids.length, 4)
  t.match(meta, { finish_reason: { type: 'stop', matched: 'cd' }, completion_tokens: 4 })
  const kept = (await call(`${url}/generate`, {
    ...body,
    sampling_params: { ...body.sampling_params, stop: 'cd', no_stop_trim: true }
  }))
    .json
  t.equal(kept.text, 'abcd')
  const events = frames((await call(`${url}/generate`, { ...body, stream: true })).text).slice(0, -1)
  t.ok(events.every(event => 'ab'.startsWith(event.text)), 'nothing of the stop text is shown')
  t.same(events.at(-1).meta_info.finish_reason, { type: 'stop', matched: 'cd' })
})

t.test('stop tokens end the output with the token and the text without it', async t => {
  const { url } = await routeApp(t)
  const { text, output_ids: ids, meta_info: meta } =
    (await call(`${url}/generate`, { input_ids: [97, 98, 99], sampling_params: { stop_token_ids: [98] } })).json
  t.same([text, ids, meta.finish_reason], ['a', [97, 98], { type: 'stop', matched: 98 }])
  const through =
    (await call(`${url}/generate`, { input_ids: [97, 2], sampling_params: { ignore_eos: true, max_new_tokens: 4 } }))
      .json
  t.same([through.text, through.meta_info.finish_reason], ['aa', { type: 'length', length: 4 }])
})
