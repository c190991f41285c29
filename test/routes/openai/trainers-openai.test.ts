import t from 'tap'
import { call, routeApp, until } from '../../helpers/route-app.ts'

t.test("AReaL's completions accept token ids and return token ids", async t => {
  const { url } = await routeApp(t)
  const { choices: [choice] } = (await call(`${url}/v1/completions`, {
    prompt: [97, 98],
    max_tokens: 3,
    top_p: 1,
    temperature: 1,
    stop_token_ids: [2],
    ignore_eos: false,
    skip_special_tokens: false,
    logprobs: 0,
    stream: false,
    use_beam_search: false,
    return_tokens_as_token_ids: true
  }))
    .json
  t.same(choice.logprobs.tokens.map((token: string) => Number(token.split(':')[1])), [97, 98, 97])
  t.same(choice.logprobs.token_logprobs, [-0.97, -0.98, -0.97])
  t.equal(choice.finish_reason, 'length')
})

t.test("TRL's completions return the logprobs of every token with keys of the form token_id:ID", async t => {
  const { url } = await routeApp(t)
  const { json } = await call(`${url}/v1/completions`, {
    model: 'fake',
    prompt: [[97, 98], [99]],
    return_token_ids: true,
    return_tokens_as_token_ids: true,
    n: 2,
    repetition_penalty: 1,
    temperature: 1,
    top_p: 1,
    top_k: 0,
    min_p: 0,
    max_tokens: 2,
    logprobs: 1
  })
  t.equal(json.choices.length, 4)
  t.same(json.choices[2], {
    ...json.choices[2],
    prompt_token_ids: [99],
    token_ids: [99, 99],
    logprobs: {
      tokens: ['token_id:99', 'token_id:99'],
      token_logprobs: [-0.99, -0.99],
      top_logprobs: [{ 'token_id:99': -0.99 }, { 'token_id:99': -0.99 }],
      text_offset: [0, 11]
    }
  })
})

t.test("completions score prompts for TRL's teacher, with scores of its own for each choice", async t => {
  const { url, engine } = await routeApp(t)
  const { json } = await call(`${url}/v1/completions`, {
    prompt: [[5, 6], [7, 8, 9]],
    max_tokens: 1,
    temperature: 1,
    prompt_logprobs: 2
  })
  t.same(
    json.choices.map((choice: any) =>
      choice.prompt_logprobs.map((row: any) => row === null ? null : Object.keys(row).map(Number))
    ),
    [[null, [6, 7]], [null, [8, 9], [9, 10]]]
  )
  t.same(json.choices[0].prompt_logprobs[1][6], { logprob: -0.06, rank: 1, decoded_token: '\x06' })
  t.same(json.choices.map((choice: any) => choice.logprobs), [null, null])
  t.match(engine.requests[0]!.logprobs, { startLen: 0, top: 2, raw: false })
  const both = (await call(`${url}/v1/completions`, {
    prompt: [5, 6],
    max_tokens: 1,
    prompt_logprobs: 3,
    logprobs: 1,
    echo: true
  }))
    .json
    .choices[0]
  t.equal(Object.keys(both.logprobs.top_logprobs[1]).length, 1, 'the two have counts of their own')
  t.equal(Object.keys(both.prompt_logprobs[1]).length, 3)
  const plain = (await call(`${url}/v1/completions`, { prompt: [5], max_tokens: 1, logprobs: 1 })).json.choices[0]
  t.notOk('prompt_logprobs' in plain)
  for (
    const body of [{ prompt_logprobs: -2 }, { prompt_logprobs: 1025 }, { prompt_logprobs: 1, stream: true }, {
      prompt_logprobs: 'all'
    }]
  ) t.equal((await call(`${url}/v1/completions`, { prompt: [5], ...body })).status, 400, JSON.stringify(body))
})

t.test('chat returns token ids of prompt and output and scores of the prompt; tools reach the template', async t => {
  const { url } = await routeApp(t)
  const messages = [{ role: 'user', content: 'hi' }]
  const { json } = await call(`${url}/v1/chat/completions`, {
    messages,
    max_tokens: 2,
    logprobs: true,
    top_logprobs: 0,
    return_token_ids: true,
    return_tokens_as_token_ids: true,
    prompt_logprobs: 0,
    tools: [{ type: 'function' }],
    tool_choice: 'none',
    cache_salt: 's'
  })
  t.equal(Buffer.from(json.prompt_token_ids).toString(), 'user:hi\nassistant:')
  t.equal(json.prompt_logprobs.length, json.prompt_token_ids.length)
  t.equal(json.prompt_logprobs[0], null)
  t.same(json.choices[0].token_ids, [...Buffer.from('us')])
  t.same(json.choices[0].logprobs.content.map(({ token, top_logprobs: top }: any) => [token, top]), [[
    'token_id:117',
    []
  ], ['token_id:115', []]])
  t.equal((await call(`${url}/v1/chat/completions`, { messages, prompt_logprobs: 1, stream: true })).status, 400)
})

t.test('a conversation is rendered into a generation request with the same outcome', async t => {
  const { url, engine } = await routeApp(t)
  const messages = [{ role: 'user', content: 'hi' }]
  const { json } = await call(`${url}/v1/chat/completions/render`, {
    model: 'x',
    messages,
    max_tokens: 3,
    temperature: 0.5,
    top_k: 5,
    seed: -7,
    stop: ['q'],
    logprobs: true,
    top_logprobs: 1,
    cache_salt: 'salt',
    logit_bias: { 4: 1 }
  })
  t.equal(Buffer.from(json.token_ids).toString(), 'user:hi\nassistant:')
  t.match(json, {
    model: 'fake',
    features: null,
    cache_salt: 'salt',
    sampling_params: {
      max_tokens: 3,
      temperature: 0.5,
      top_k: 5,
      seed: -7,
      stop: ['q'],
      logprobs: 1,
      logit_bias: { 4: 1 },
      n: 1
    }
  })
  t.same(engine.requests, [], 'nothing is generated')
  const answer = (await call(`${url}/inference/v1/generate`, json)).json
  const chat = (await call(`${url}/v1/chat/completions`, {
    messages,
    max_tokens: 3,
    temperature: 0.5,
    top_k: 5,
    seed: -7,
    stop: ['q'],
    logprobs: true,
    top_logprobs: 1,
    cache_salt: 'salt',
    logit_bias: { 4: 1 },
    return_token_ids: true
  }))
    .json
  t.same(answer.choices[0].token_ids, chat.choices[0].token_ids)
  const [first, second] = engine.requests
  t.same({ ...first, rid: '' }, { ...second, rid: '' }, 'the same to the engine')
  for (const body of [{}, { messages: [] }, { messages, chat_template: 'x' }, { messages, temperature: -1 }]) {
    t.equal(
      (await call(`${url}/v1/chat/completions/render`, body)).status,
      400,
      JSON.stringify(body)
    )
  }
})

t.test("tokenize and detokenize reply in vLLM's form", async t => {
  const { url } = await routeApp(t)
  t.same((await call(`${url}/tokenize`, { model: 'x', prompt: 'ab', add_special_tokens: false })).json, {
    tokens: [97, 98],
    count: 2,
    max_model_len: 512
  })
  t.same((await call(`${url}/detokenize`, { model: 'x', tokens: [97, 256, 98] })).json, {
    text: 'ab',
    prompt: 'a<bos>b'
  }, "vLLM's field has special tokens, SGLang's has not")
  t.same((await call(`${url}/detokenize`, { tokens: [97, 256], skip_special_tokens: true })).json, {
    text: 'a',
    prompt: 'a'
  })
  t.same((await call(`${url}/detokenize`, { tokens: [[97, 256], [98]], skip_special_tokens: false })).json, {
    text: ['a<bos>', 'b'],
    prompt: ['a<bos>', 'b']
  })
})

t.test('completions wait while generation is paused', async t => {
  const { url, engine } = await routeApp(t)
  await call(`${url}/pause`, { mode: 'keep' })
  let done = false
  const pending = call(`${url}/v1/completions`, { prompt: [97], max_tokens: 1 }).then(reply => {
    done = true
    return reply
  })
  await until(() => engine.live === 1)
  t.notOk(done)
  await call(`${url}/resume`, {})
  t.equal((await pending).json.choices[0].finish_reason, 'length')
})
