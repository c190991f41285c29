import t from 'tap'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import { call, routeApp, until } from '../../helpers/route-app.ts'

t.test('texts and token ids are completed, and the n samples of a prompt are adjacent', async t => {
  const { url, engine } = await routeApp(t)
  const { status, json } = await call(`${url}/generate/`, {
    prompts: ['ab', 'xyz'],
    images: null,
    n: 2,
    repetition_penalty: 1,
    temperature: 0.5,
    top_p: 0.75,
    top_k: -1,
    min_p: 0.25,
    max_tokens: 3,
    truncate_prompt_tokens: null,
    structured_outputs_regex: null,
    generation_kwargs: {}
  })
  t.equal(status, 200)
  const [a, b, x, y, z] = [...Buffer.from('abxyz')] as [number, number, number, number, number]
  t.same(json.prompt_ids, [[a, b], [x, y, z]])
  t.same(json.completion_ids, [[a, b, a], [a, b, a], [x, y, z], [x, y, z]])
  t.same(
    json.logprobs,
    json.completion_ids.map((ids: number[]) => ids.map(id => [-id / 100])),
    "the token's own alone, by default"
  )
  t.same(json.logprob_token_ids, json.completion_ids.map((ids: number[]) => ids.map(id => [id])))
  t.match(engine.requests[0], { sampling: { temperature: 0.5, topP: 0.75, topK: 0, minP: 0.25 } })
  t.same((await call(`${url}/generate/`, { prompts: [[5, 6]], max_tokens: 2, logprobs: null })).json, {
    prompt_ids: [[5, 6]],
    completion_ids: [[5, 6]],
    logprobs: null,
    logprob_token_ids: null
  })
  t.equal((await call(`${url}/generate/`, { prompts: [[5]] })).json.completion_ids[0].length, 16, 'the default')
})

t.test('logprobs are sorted, with the token itself among them', async t => {
  const engine = new FakeEngine()
  const original = engine.generate.bind(engine)
  engine.generate = async function* (request) {
    for await (const event of original(request)) {
      yield {
        ...event,
        top: event.top.map((): [number, number][] => [[-0.001, 1], [-0.002, 2]])
      }
    }
  }
  const { url } = await routeApp(t, { engine })
  const { json } = await call(`${url}/generate/`, { prompts: [[5]], max_tokens: 1, logprobs: 2 })
  t.same(json.logprobs, [[[-0.001, -0.002, -0.05]]])
  t.same(json.logprob_token_ids, [[[1, 2, 5]]])
})

t.test('generation_kwargs win over the fields beside them', async t => {
  const { url, engine } = await routeApp(t)
  const { json } = await call(`${url}/generate/`, {
    prompts: ['abc'],
    max_tokens: 9,
    temperature: 1,
    generation_kwargs: { max_tokens: 2, n: 2, seed: 3, stop: ['zz'], frequency_penalty: 0.5, temperature: 0 }
  })
  t.equal(json.completion_ids.length, 2)
  t.match(engine.requests[1], { sampling: { maxNewTokens: 2, seed: 4n, frequencyPenalty: 0.5, temperature: 0 } })
})

t.test('prompts are truncated from the left on request', async t => {
  const { url } = await routeApp(t)
  const ids = async (last: number) =>
    (await call(`${url}/generate/`, { prompts: [[5, 6, 7], [8]], max_tokens: 1, truncate_prompt_tokens: last }))
      .json
      .prompt_ids
  t.same(await ids(2), [[6, 7], [8]])
  t.same(await ids(-1), [[5, 6, 7], [8]])
})

t.test('conversations and tools are rendered by the chat template', async t => {
  const { url } = await routeApp(t)
  const { json } = await call(`${url}/chat/`, {
    messages: [[{ role: 'user', content: 'hi' }], [{ role: 'user', content: 'yo' }]],
    max_tokens: 4,
    chat_template_kwargs: { shout: true },
    tools: null
  })
  t.same(json.prompt_ids.map((ids: number[]) => Buffer.from(ids).toString()), [
    'user:hi\n!assistant:',
    'user:yo\n!assistant:'
  ])
  t.same(json.completion_ids.map((ids: number[]) => Buffer.from(ids).toString()), ['user', 'user'])
  t.equal(
    (await call(`${url}/chat/`, {
      messages: [[{ role: 'user', content: 'hi' }]],
      max_tokens: 1,
      tools: [{ type: 'function', function: { name: 'f' } }]
    }))
      .status,
    200
  )
})

t.test('given sequences are scored from the end of their prompts', async t => {
  const { url, engine } = await routeApp(t)
  const score = async (body: object) => await call(`${url}/get_sequence_logprobs/`, body)
  const { json } = await score({
    sequences: [[5, 6, 7], [8, 9]],
    prompt_lengths: [1, 0],
    top_logprobs: 2,
    temperature: 1
  })
  t.same(json, {
    logprobs: [[[-0.06, -0.07], [-0.07, -0.08]], [[], [-0.09, -0.1]]],
    logprob_token_ids: [[[6, 7], [7, 8]], [[], [9, 10]]]
  })
  t.match(engine.requests[0], { sampling: { maxNewTokens: 0 }, logprobs: { startLen: 1, top: 2, raw: true } })
  const binary = (await score({
    sequences: [[5, 6, 7], [8, 9]],
    prompt_lengths: [1, 1],
    top_logprobs: 2,
    response_format: 'binary'
  }))
    .json
  t.same([binary.shape, binary.completion_lengths], [[2, 2, 2], [2, 1]])
  const read = (text: string, ArrayOf: typeof Float32Array | typeof Int32Array): number[] => {
    const bytes = Buffer.from(text, 'base64')
    return [...new ArrayOf(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length))]
  }
  const rounded = (text: string) => read(text, Float32Array).map(value => Math.round(value * 100) / 100)
  t.same(rounded(binary.logprobs_b64), [-0.06, -0.07, -0.07, -0.08, -0.09, -0.1, -Infinity, -Infinity])
  t.same(read(binary.token_ids_b64, Int32Array), [6, 7, 7, 8, 9, 10, 0, 0])
  t.same(rounded(binary.actual_logprobs_b64), [-0.06, -0.07, -0.09, -Infinity])
  t.same(read(binary.actual_token_ids_b64, Int32Array), [6, 7, 9, 0])
  for (
    const [body, message] of [
      [{ sequences: [[5]], prompt_lengths: [] }, /prompt_lengths: expected one for each of the 1 sequences, got 0/],
      [{ sequences: [[5]], prompt_lengths: [2] }, /prompt_lengths\[0\]: expected at most the 1 tokens/],
      [{ sequences: [[5, 300]], prompt_lengths: [1] }, /sequences\[0\]\[1\] is 300/],
      [{ sequences: [[]], prompt_lengths: [0] }, /sequences\[0\] cannot be empty/],
      [
        { sequences: [[5]], prompt_lengths: [0], temperature: 2 },
        /temperature: given sequences are scored by the model's own distribution/
      ],
      [{ sequences: [Array(513).fill(5)], prompt_lengths: [0] }, /longer than the model's context length/]
    ] as const
  ) {
    const refused = await score(body)
    t.equal(refused.status, 400)
    t.match(refused.json.message, message)
  }
})

t.test('an aborted scoring request gets an error and no scores', async t => {
  const { url, engine } = await routeApp(t)
  await engine.pause('in_place')
  for (const format of ['json', 'binary']) {
    const scores = call(`${url}/get_sequence_logprobs/`, {
      sequences: [[5, 6], [7, 8]],
      prompt_lengths: [1, 1],
      response_format: format
    })
    await until(() => engine.live === 2)
    engine.abortAll()
    const { status, json } = await scores
    t.equal(status, 409)
    t.match(json.message, /aborted .* send it again/)
  }
})

t.test("size and health have TRL's paths", async t => {
  const { url, engine } = await routeApp(t)
  t.same((await call(`${url}/get_world_size/`)).json, { world_size: 2 })
  t.same((await call(`${url}/get_tensor_parallel_size/`)).json, { tensor_parallel_size: 2 })
  t.match((await call(`${url}/health/`)).json, { status: 'ok' })
  engine.closed = true
  t.equal((await call(`${url}/health/`)).status, 503)
})

t.test("SGLang's /generate and TRL's /generate/ are served side by side", async t => {
  const { url } = await routeApp(t)
  t.same((await call(`${url}/generate`, { input_ids: [5], sampling_params: { max_new_tokens: 1 } })).json.output_ids, [
    5
  ])
  t.same((await call(`${url}/generate/`, { prompts: [[5]], max_tokens: 1 })).json.completion_ids, [[5]])
})

t.test('invalid bodies are refused before the engine is called', async t => {
  const { url, engine } = await routeApp(t, { maxBatch: 4 })
  for (
    const [path, body, message] of [
      ['/generate/', {}, /prompts: is required/],
      ['/generate/', { prompts: [] }, /prompts/],
      ['/generate/', { prompts: 'hello' }, /prompts: expected/],
      ['/generate/', { prompts: [''] }, /prompts\[0\] has no tokens/],
      ['/generate/', { prompts: [[999]] }, /prompts\[0\]\[0\] is 999/],
      ['/generate/', { prompts: [[5]], n: 5 }, /n: expected at most 4 samples/],
      ['/generate/', { prompts: [[5], [5], [5], [5], [5]] }, /prompts: expected at most 4 samples/],
      ['/generate/', { prompts: [[5]], images: [['abc']] }, /images: images: not supported/],
      [
        '/generate/',
        { prompts: [[5]], structured_outputs_regex: 'a+', generation_kwargs: { structured_outputs: {} } },
        /structured_outputs: expected exactly one of/
      ],
      ['/generate/', { prompts: [[5]], generation_kwargs: { allowed_token_ids: [] } }, /allowed_token_ids: is empty/],
      ['/generate/', { prompts: [[5]], generation_kwargs: { prompt_logprobs: 1 } }, /get_sequence_logprobs/],
      [
        '/generate/',
        { prompts: [[5]], truncate_prompt_tokens: 0 },
        /truncate_prompt_tokens: expected -1 or at least 1/
      ],
      ['/generate/', { prompts: [Array(512).fill(5)] }, /longer than the model's context length/],
      ['/chat/', { messages: [] }, /messages/],
      ['/chat/', { messages: [{ role: 'user', content: 'x' }] }, /messages\[0\]: expected an array/],
      ['/chat/', { messages: [[]] }, /messages/]
    ] as const
  ) {
    const { status, json } = await call(url + path, body)
    t.equal(status, 400, JSON.stringify(body))
    t.match(json.message, message)
  }
  t.same(engine.requests, [])
  t.equal(
    (await call(`${url}/generate/`, { prompts: [[5]], images: [null], max_tokens: 1 })).status,
    200,
    'no image is no image'
  )
})

t.test("vLLM's other fields are refused where they would have no effect, and unknown ones are ignored", async t => {
  const { url, engine } = await routeApp(t)
  const plain = { prompts: [[5, 6]], max_tokens: 2 }
  const chat = { messages: [[{ role: 'user', content: 'a' }]], max_tokens: 1 }
  for (const name of ['stop', 'seed', 'bad_words', 'allowed_token_ids', 'prompt_logprobs', 'structured_outputs']) {
    for (const [path, body] of [['/generate/', plain], ['/chat/', chat]] as const) {
      const { status, json } = await call(url + path, { ...body, [name]: 'x' })
      t.equal(status, 400, `${path} ${name}`)
      t.match(json, { param: name, message: /would have no effect; send it in generation_kwargs$/ })
    }
  }
  t.equal(engine.requests.length, 0)
  t.equal((await call(`${url}/generate/`, { ...plain, stop: [], seed: null, of_no_owner: 5 })).status, 200)
  t.equal(
    (await call(`${url}/generate/`, { ...plain, generation_kwargs: { stop: 5 } })).status,
    400,
    'a known one is checked'
  )
})
