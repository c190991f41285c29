import t from 'tap'
import { call, frames, routeApp, until } from '../../helpers/route-app.ts'
import { FakeEngine } from '../../helpers/fake-engine.ts'

t.test("a text prompt gets SGLang's complete reply", async t => {
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
    dp_rank: null,
    reasoning_tokens: 0,
    completion_tokens: 3,
    cached_tokens: 3,
    seed: '4242'
  })
  t.ok(latency >= 0 && sentAt > 1e9)
  t.equal(reply.headers.get('content-type'), 'application/json')
  t.equal(engine.live, 0)
})

t.test('PUT behaves as POST', async t => {
  const { url } = await routeApp(t)
  const reply = await call(`${url}/generate`, { input_ids: [5, 6], sampling_params: { max_new_tokens: 2 } }, {
    method: 'PUT'
  })
  t.same(reply.json.output_ids, [5, 6])
})

t.test(
  'null and absent sampling parameters are defaults, and max_new_tokens null ' +
    'means the rest of the context',
  async t => {
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
  }
)

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

t.test('temperatures too small to divide by are greedy, and top_k of the vocabulary size is off', async t => {
  const { url, engine } = await routeApp(t)
  await call(`${url}/generate`, { input_ids: [5, 2], sampling_params: { temperature: 1e-7, top_k: 300 } })
  t.match(engine.requests[0]!.sampling, { temperature: 0, topK: 0 })
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

t.test('outputs of a batch with n samples are in order, and the n samples of a prompt are adjacent', async t => {
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

t.test('tokens have the label of the weights that made them, by spans', async t => {
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

t.test('request ids that are in use are refused, also inside one batch', async t => {
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

t.test('an abort ends all samples of a request id, or of all ids with a prefix', async t => {
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

t.test('the text ends before a stop text, or after it on request, also across events of a stream', async t => {
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

t.test('stop_regex ends the text on every route that has text', async t => {
  const { url } = await routeApp(t)
  const sampling = { max_new_tokens: 20, temperature: 0 }
  const generate = async (stop: unknown): Promise<any> =>
    (await call(`${url}/generate`, { text: 'ab12cd34', sampling_params: { ...sampling, stop_regex: stop } })).json
  t.match(await generate('[0-9]+c'), {
    text: 'ab12c',
    meta_info: { finish_reason: { type: 'stop', matched: '[0-9]+c' } }
  })
  t.match(await generate(['x+', '\\d']), { text: 'ab1', meta_info: { finish_reason: { matched: '\\d' } } })
  t.match(await generate('cd'), { text: 'ab12', meta_info: { finish_reason: { matched: 'cd' } } }, 'plain text is cut')
  t.equal((await generate(null)).meta_info.finish_reason.type, 'length')
  t.match(await generate('(a)\\1'), { error: { code: 'INVALID_REQUEST', message: /^sampling_params\.stop_regex: / } })
  for (
    const [path, body] of [['completions', { prompt: 'ab12cd' }], ['chat/completions', {
      messages: [{ role: 'user', content: 'x' }],
      input_ids: [...Buffer.from('ab12cd')]
    }]] as const
  ) {
    const { json } = await call(`${url}/v1/${path}`, { ...body, max_tokens: 20, stop_regex: '[0-9]{2}' })
    t.match(json.choices[0], { finish_reason: 'stop', matched_stop: '[0-9]{2}' })
    t.equal(json.choices[0].text ?? json.choices[0].message.content, 'ab12')
  }
  const plain = await routeApp(t, { tokenizer: null })
  const refused = await call(`${plain.url}/generate`, { input_ids: [5], sampling_params: { stop_regex: 'a+' } })
  t.match(refused, { status: 400, json: { message: /^sampling_params\.stop_regex: this server has no tokenizer/ } })
})

t.test('a seed of 63 bits is rounded as JSON numbers are, and is the same each time', async t => {
  const { url, engine } = await routeApp(t)
  for (const seed of ['8223372036854775807', '8223372036854775807', '-9007199254740993', '9007199254740991']) {
    const reply = await fetch(`${url}/generate`, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: `{"input_ids":[5],"sampling_params":{"max_new_tokens":1,"sampling_seed":${seed}}}`
    })
    t.equal(reply.status, 200)
  }
  t.same(engine.requests.map(request => BigInt.asIntN(64, request.sampling.seed!)), [
    8223372036854775808n,
    8223372036854775808n,
    -9007199254740992n,
    9007199254740991n
  ])
})
