import t from 'tap'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import { call, frames, routeApp, until } from '../../helpers/route-app.ts'

t.test("a completion has OpenAI's form and SGLang's additions", async t => {
  const { url } = await routeApp(t)
  const { status, json } = await call(`${url}/v1/completions`, { model: 'whatever', prompt: 'hello', max_tokens: 3 })
  t.equal(status, 200)
  const { id, created, ...rest } = json
  t.match(id, /^cmpl-[0-9a-f]{32}$/)
  t.ok(Number.isInteger(created))
  t.same(rest, {
    object: 'text_completion',
    model: 'fake',
    choices: [{ index: 0, text: 'hel', logprobs: null, finish_reason: 'length', matched_stop: null }],
    usage: { prompt_tokens: 5, completion_tokens: 3, total_tokens: 8, prompt_tokens_details: { cached_tokens: 3 } },
    metadata: { weight_version: 'default' }
  })
})

t.test('prompts are text, ids or batches of either, and the n samples of a prompt are adjacent', async t => {
  const { url, engine } = await routeApp(t)
  const texts = async (body: object) =>
    (await call(`${url}/v1/completions`, { max_tokens: 2, ...body })).json.choices.map((choice: any) => choice.text)
  t.same(await texts({ prompt: [97, 98] }), ['ab'])
  t.same(await texts({ prompt: ['ab', 'cd'] }), ['ab', 'cd'])
  t.same(await texts({ prompt: [[97], [98]], n: 2, seed: -1 }), ['aa', 'aa', 'bb', 'bb'])
  t.same(engine.requests.slice(-4).map(request => request.sampling.seed), [2n ** 64n - 1n, 0n, 2n ** 64n - 1n, 0n])
  const usage = (await call(`${url}/v1/completions`, { max_tokens: 2, prompt: [[97], [98]], n: 2 })).json.usage
  t.match(usage, { prompt_tokens: 2, completion_tokens: 8 }, 'a prompt counts once')
})

t.test('the default is 16 tokens, less where the context ends', async t => {
  const { url } = await routeApp(t)
  t.equal((await call(`${url}/v1/completions`, { prompt: 'a' })).json.usage.completion_tokens, 16)
  t.equal((await call(`${url}/v1/completions`, { prompt: Array(510).fill(97) })).json.usage.completion_tokens, 2)
})

t.test('extras of SGLang and vLLM reach the engine', async t => {
  const { url, engine } = await routeApp(t)
  await call(`${url}/v1/completions`, {
    prompt: 'a',
    top_k: 0,
    min_p: 0.5,
    min_tokens: 2,
    repetition_penalty: 1.1,
    stop_token_ids: [7],
    ignore_eos: true,
    cache_salt: 'x',
    rid: 'mine',
    user: 'u',
    suffix: null,
    best_of: 1,
    logit_bias: { 5: 100 }
  })
  t.match(engine.requests[0], {
    rid: 'mine',
    cacheSalt: 'x',
    sampling: {
      topK: 0,
      minP: 0.5,
      minNewTokens: 2,
      repetitionPenalty: 1.1,
      stopTokenIds: [7],
      ignoreEos: true,
      logitBias: [[5, 100]]
    }
  })
})

t.test('echo without a tokenizer scores the prompt, and its text is empty as all texts are', async t => {
  const { url } = await routeApp(t, { tokenizer: null })
  const body = { prompt: [97, 98, 99], max_tokens: 1, logprobs: 1, echo: true, return_token_ids: true }
  const reply = await call(`${url}/v1/completions`, { ...body, return_tokens_as_token_ids: true })
  const [choice] = reply.json.choices
  t.equal(choice.text, '')
  t.same(choice.logprobs.tokens, ['token_id:97', 'token_id:98', 'token_id:99', 'token_id:97'])
  t.same(choice.logprobs.token_logprobs, [null, -0.98, -0.99, -0.97])
  t.same(choice.prompt_token_ids, [97, 98, 99])
})

t.test('logprobs have the completions form, and echo adds those of the prompt', async t => {
  const { url } = await routeApp(t)
  const [plain] = (await call(`${url}/v1/completions`, { prompt: 'abc', max_tokens: 2, logprobs: 0 })).json.choices
  t.same(plain.logprobs, {
    tokens: ['a', 'b'],
    token_logprobs: [-0.97, -0.98],
    top_logprobs: [{ a: -0.97 }, { b: -0.98 }],
    text_offset: [0, 1]
  })
  const [single] = (await call(`${url}/v1/completions`, { prompt: 'abc', max_tokens: 2, logprobs: true })).json.choices
  const [one] = (await call(`${url}/v1/completions`, { prompt: 'abc', max_tokens: 2, logprobs: 1 })).json.choices
  t.same(single.logprobs, one.logprobs, "true is 1, as pydantic reads vLLM's field")
  const [echoed] =
    (await call(`${url}/v1/completions`, { prompt: 'abc', max_tokens: 1, logprobs: 2, echo: true })).json.choices
  t.equal(echoed.text, 'abca')
  t.same(echoed.logprobs.tokens, ['a', 'b', 'c', 'a'])
  t.same(echoed.logprobs.token_logprobs, [null, -0.98, -0.99, -0.97])
  t.same(echoed.logprobs.top_logprobs, [null, { b: -0.98, c: -0.99 }, { c: -0.99, d: -1 }, { a: -0.97, b: -0.98 }])
  t.same(echoed.logprobs.text_offset, [0, 1, 2, 3])
  const scored = (await call(`${url}/v1/completions`, { prompt: 'abc', max_tokens: 0, logprobs: 1, echo: true })).json
  t.same(scored.choices[0].logprobs.token_logprobs, [null, -0.98, -0.99])
  t.equal(scored.usage.completion_tokens, 0)
  const [ids] = (await call(`${url}/v1/completions`, {
    prompt: [97, 98],
    max_tokens: 1,
    logprobs: 0,
    return_tokens_as_token_ids: true,
    return_token_ids: true
  }))
    .json
    .choices
  t.same(ids.logprobs.tokens, ['token_id:97'])
  t.match(ids, { token_ids: [97], prompt_token_ids: [97, 98] })
})

t.test('streams send the new text of each event, and usage on request', async t => {
  const { url } = await routeApp(t)
  const body = { prompt: ['abc', 'xyz'], max_tokens: 3, stream: true, logprobs: 0, echo: true, return_token_ids: true }
  const all = frames((await call(`${url}/v1/completions`, { ...body, stream_options: { include_usage: true } })).text)
  t.equal(all.at(-1), '[DONE]')
  t.match(all.at(-2), { choices: [], usage: { prompt_tokens: 6, completion_tokens: 6, total_tokens: 12 } })
  const chunks = all.slice(0, -2)
  for (const index of [0, 1]) {
    const own = chunks.flatMap(chunk => chunk.choices).filter((choice: any) => choice.index === index)
    const expected = ['abc', 'xyz'][index]!
    t.equal(own.map((choice: any) => choice.text).join(''), expected + expected)
    t.same(own.flatMap((choice: any) => choice.logprobs.tokens).join(''), expected + expected)
    t.same(own.flatMap((choice: any) => choice.logprobs.text_offset), [0, 1, 2, 3, 4, 5])
    t.same(own.flatMap((choice: any) => choice.token_ids), [...Buffer.from(expected)])
    t.same(own.map((choice: any) => choice.finish_reason).filter(Boolean), ['length'])
    t.equal(own.at(-1).finish_reason, 'length')
  }
  t.ok(chunks.every(chunk => chunk.usage === null))
  t.notOk(frames((await call(`${url}/v1/completions`, body)).text).some(chunk => chunk.usage !== undefined))
})

t.test('a stream ends before a stop text and never sends a part of it', async t => {
  const { url } = await routeApp(t)
  const chunks = frames(
    (await call(`${url}/v1/completions`, { prompt: 'abcdef', stop: 'def', stream: true, max_tokens: 50 })).text
  )
    .slice(0, -1)
  t.equal(chunks.map(chunk => chunk.choices[0].text).join(''), 'abc')
  t.match(chunks.at(-1).choices[0], { finish_reason: 'stop', matched_stop: 'def' })
})

t.test('a prompt that looks like a number stays text', async t => {
  const { url, engine } = await routeApp(t)
  const prompts = async (prompt: unknown): Promise<number[][]> => {
    const from = engine.requests.length
    t.equal((await call(`${url}/v1/completions`, { prompt, max_tokens: 1 })).status, 200, JSON.stringify(prompt))
    return engine.requests.slice(from).map(({ inputIds }) => [...inputIds])
  }
  const texts: string[][] = [['1', '2+2='], ['1', '2'], ['7'], [' 8 ', '-1e3']]
  for (const batch of texts) {
    const alone: number[][] = []
    for (const text of batch) alone.push(...await prompts(text))
    t.same(await prompts(batch), alone)
    t.equal(alone.length, batch.length)
  }
  t.same(await prompts([1, 2]), [[1, 2]])
  t.same(await prompts([[1], [2]]), [[1], [2]])
  t.same(await prompts([['1'], [2, '3']]), [[1], [2, 3]], 'ids as texts, where nothing else is possible')
})

t.test("errors have OpenAI's shape", async t => {
  const { url } = await routeApp(t)
  const cases: [object, RegExp, string][] = [
    [{}, /^prompt: is required$/, 'prompt'],
    [{ prompt: [] }, /^prompt: cannot be empty$/, 'prompt'],
    [{ prompt: '' }, /^prompt has no tokens/, 'prompt'],
    [{ prompt: [[97], [300]] }, /^prompt\[1\]\[0\] is 300; expected/, 'prompt[1][0]'],
    [{ prompt: ['a', 5] }, /^prompt\[1\]: expected a string, got 5$/, 'prompt[1]'],
    [{ prompt: 'a', temperature: -1 }, /^temperature must be non-negative/, 'temperature'],
    [{ prompt: 'a', temperature: 1e39 }, /^temperature must be a finite float32, got 1e\+39\.$/, 'temperature'],
    [
      { prompt: 'a', logit_bias: { 5: 1e39 } },
      /^logit_bias must have finite float32 values, got 1e\+39 for 5\.$/,
      'logit_bias'
    ],
    [{ prompt: 'a', max_tokens: -1 }, /^max_tokens: expected a number >= 0, got -1$/, 'max_tokens'],
    [
      { prompt: 'a', max_tokens: 4, min_tokens: 5 },
      /^min_tokens must be in \[0, max_tokens\(4\)\], got 5\.$/,
      'min_tokens'
    ],
    [{ prompt: 'a', min_tokens: 17 }, /^min_tokens must be in \[0, max_tokens\(16\)\], got 17\.$/, 'min_tokens'],
    [{ prompt: 'a', seed: 2 ** 64 }, /^seed 18446744073709552000 has more than 64 bits/, 'seed'],
    [{ prompt: 'a', n: 0 }, /^n: expected a number >= 1, got 0$/, 'n'],
    [{ prompt: 'a', best_of: 3 }, /^best_of: only the value of n/, 'best_of'],
    [{ prompt: 'a', suffix: 'x' }, /^suffix: suffixes: not supported/, 'suffix'],
    [{ prompt: 'a', lora_path: 'x' }, /^lora_path: LoRA adapters are not enabled/, 'lora_path'],
    [{ prompt: 'a', model: 'fake:adapter' }, /^model: LoRA adapters are not enabled/, 'model'],
    [
      { prompt: 'a', response_format: { type: 'json' } },
      /^response_format.type: expected text/,
      'response_format.type'
    ],
    [{ prompt: Array(513).fill(97) }, /^The input \(513 tokens\)/, 'prompt']
  ]
  for (const [body, message, param] of cases) {
    const { status, json } = await call(`${url}/v1/completions`, body)
    t.equal(status, 400)
    t.match(json.error, { message, param, type: 'invalid_request_error', code: /^[A-Z_]+$/ })
  }
  const plain = await call(`${url}/v1/completions`, undefined, {
    method: 'POST',
    body: 'prompt=a',
    headers: { 'content-type': 'application/x-www-form-urlencoded' }
  })
  t.equal(plain.status, 415)
  t.match(plain.json.error.message, /send JSON with "content-type: application\/json"/)
})

t.test('an abort is a finish reason, with the text so far', async t => {
  const engine = new FakeEngine({ stepMs: 2 })
  const { url } = await routeApp(t, { engine })
  const pending = call(`${url}/v1/completions`, { prompt: 'ab', rid: 'c1', max_tokens: 500 })
  await until(() => engine.stats.generationTokens > 2)
  await call(`${url}/abort_request`, { rid: 'c1' })
  const [choice] = (await pending).json.choices
  t.equal(choice.finish_reason, 'abort')
  t.match(choice.text, /^aba/)
})
