import t from 'tap'
import { joinRegex } from '../../helpers/join-regex.ts'
import { call, routeApp } from '../../helpers/route-app.ts'

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
    [{ min_new_tokens: 129 }, 'min_new_tokens must be in [0, max_new_tokens(128)], got 129.'],
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
    /sampling_seed 100000000000000000000 has more than 64 bits/
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
      joinRegex(
        /^Requested token count exceeds the model's maximum context length of 512 tokens\. You/,
        / requested a total of 513 tokens: 500 tokens from the input messages and 13 tokens for the/,
        / completion\./
      ),
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

t.test('unsupported features are refused only if they are requested', async t => {
  const { url } = await routeApp(t)
  for (
    const [field, value] of Object.entries({
      image_data: 'x',
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
  for (const [field, value] of Object.entries({ watermark: true, custom_params: { a: 1 } })) {
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
