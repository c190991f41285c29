import t from 'tap'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import { call, frames, routeApp, until } from '../../helpers/route-app.ts'

const PATH = '/inference/v1/generate'

t.test('a generation takes and returns token ids, and the reply has every field that a trainer reads', async t => {
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
    prompt_token_id_logprobs: null,
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

t.test('max_tokens is by default the rest of the context, and a larger value is reduced to it', async t => {
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
    'the prompt is scored only'
  )
})

t.test("finish reasons have vLLM's names", async t => {
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
  }, 'the reply has token ids only')
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

t.test('a sample that is paused during an update of the weights reports which tokens each version made', async t => {
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

t.test('n samples are returned as separate choices, and their prompt is counted once', async t => {
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

t.test('output mode text returns the text, and logprobs by text', async t => {
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

t.test('a stream sends only new tokens, the whole version spans at its end, and usage if it is requested', async t => {
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
