import t from 'tap'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import { call, routeApp, until } from '../../helpers/route-app.ts'

t.test("model_info and its old name have SGLang's keys", async t => {
  const { url } = await routeApp(t)
  const expected = {
    model_path: '/models/fake',
    tokenizer_path: '/models/fake',
    is_generation: true,
    preferred_sampling_params: null,
    weight_version: 'default',
    has_image_understanding: false,
    has_audio_understanding: false,
    model_type: 'qwen3',
    architectures: ['Qwen3ForCausalLM']
  }
  t.same((await call(`${url}/model_info`)).json, expected)
  t.same((await call(`${url}/get_model_info`)).json, expected)
})

t.test('server_info has the fields that trainers compare', async t => {
  const { url } = await routeApp(t)
  const { json } = await call(`${url}/server_info`)
  t.match(json, {
    tp_size: 2,
    dp_size: 1,
    pp_size: 1,
    ep_size: 1,
    moe_dp_size: 1,
    encoder_only: false,
    disaggregation_mode: 'null',
    status: 'ready',
    max_total_num_tokens: 65536,
    max_req_input_len: 511,
    weight_version: 'default',
    model_path: '/models/fake'
  })
  t.match(json.internal_states, [{
    last_gen_throughput: 7,
    memory_usage: { token_capacity: 65536 },
    effective_max_running_requests_per_dp: 256
  }])
  t.equal((await call(`${url}/get_server_info`)).json.tp_size, 2)
})

t.test('load figures show when the server is idle, as JSON and for Prometheus', async t => {
  const engine = new FakeEngine({ stepMs: 2 })
  const { url } = await routeApp(t, { engine })
  const load = async () => (await call(`${url}/v1/loads?include=core`)).json.loads[0]
  t.match(await load(), {
    dp_rank: 0,
    num_running_reqs: 0,
    num_waiting_reqs: 0,
    max_running_requests: 256,
    gen_throughput: 7
  })
  const pending = call(`${url}/generate`, { input_ids: [5], sampling_params: { max_new_tokens: 500 } })
  await until(() => engine.live === 1)
  t.equal((await load()).num_running_reqs, 1)
  t.equal((await call(`${url}/get_load`)).json[0].num_reqs, 1)
  await call(`${url}/abort_request`, { abort_all: true })
  await pending
  t.equal((await load()).num_running_reqs, 0)
  const text = await call(`${url}/v1/loads?format=prometheus`)
  t.match(text.headers.get('content-type'), /^text\/plain/)
  t.match(text.text, 'refit:load_num_running_reqs{dp_rank="0"} 0\n')
  t.equal((await call(`${url}/v1/loads?format=xml`)).status, 400)
})

t.test('models are listed and found by name, also with slashes in it', async t => {
  const { url } = await routeApp(t, { engine: new FakeEngine({ info: { servedModelName: 'org/name' } }) })
  const { json } = await call(`${url}/v1/models`)
  t.match(json, {
    object: 'list',
    data: [{
      id: 'org/name',
      object: 'model',
      owned_by: 'refit',
      root: '/models/fake',
      parent: null,
      max_model_len: 512,
      weight_version: 'default'
    }]
  })
  t.same((await call(`${url}/v1/models/org/name`)).json, json.data[0])
  t.same((await call(`${url}/v1/models/${encodeURIComponent('org/name')}`)).json, json.data[0])
  const other = await call(`${url}/v1/models/other`)
  t.equal(other.status, 404)
  t.match(other.json.error, {
    type: 'not_found_error',
    code: 'NOT_FOUND',
    message: 'there is no model "other"; the model is "org/name"'
  })
})

t.test('capabilities list what this server supports', async t => {
  const { url } = await routeApp(t)
  t.match((await call(`${url}/capabilities`)).json, {
    server: 'refit',
    pause_modes: ['abort', 'retract', 'in_place'],
    generation: { text: true },
    weights: { sources: ['disk'] }
  })
})

t.test('health reports liveness, and ready reports whether the engine can generate', async t => {
  const { url, engine } = await routeApp(t)
  const statuses = async () =>
    await Promise.all(['health', 'ready', 'health_generate'].map(async path => (await call(`${url}/${path}`)).status))
  t.same(await statuses(), [200, 200, 200])
  t.match(engine.requests.at(-1), { rid: /^HEALTH_CHECK_/, sampling: { maxNewTokens: 1 } })
  await engine.pause('in_place')
  t.same(await statuses(), [200, 200, 200], 'paused')
  t.match((await call(`${url}/health`)).json, { status: 'paused', paused: 'in_place' })
  await engine.resume()
  engine.weights = { state: 'torn', tensors: ['a', 'b'], reason: 'a read failed' }
  t.same(await statuses(), [200, 503, 503], 'torn')
  t.match((await call(`${url}/health`)).json, {
    status: 'torn',
    weights: { state: 'torn', tensors: ['a', 'b'], torn_count: 2, reason: 'a read failed' }
  })
  t.equal((await call(`${url}/ready`)).headers.get('retry-after'), '1')
  engine.weights = { state: 'current' }
  await engine.close()
  t.same(await statuses(), [503, 503, 503], 'closed')
  t.equal((await call(`${url}/ping`)).text, '')
  t.same((await call(url)).json, 'refit is running')
})

t.test('health_generate accepts steps of other requests if its own cannot run', async t => {
  const engine = new FakeEngine({ stepMs: 5, info: { maxRunningRequests: 1, maxQueuedRequests: 0 } })
  const { url } = await routeApp(t, { engine })
  const pending = call(`${url}/generate`, { input_ids: [5], sampling_params: { max_new_tokens: 500 } })
  await until(() => engine.live === 1)
  t.equal((await call(`${url}/health_generate`)).status, 200)
  t.equal(engine.requests.length, 1)
  await call(`${url}/abort_request`, { abort_all: true })
  await pending
})

t.test('tokenize and detokenize accept one text or many, under both paths', async t => {
  const { url } = await routeApp(t)
  for (const prefix of ['', '/v1']) {
    t.same((await call(`${url}${prefix}/tokenize`, { model: 'x', prompt: 'ab', add_special_tokens: false })).json, {
      tokens: [97, 98],
      count: 2,
      max_model_len: 512
    })
    t.same((await call(`${url}${prefix}/tokenize`, { prompt: ['a', 'bc'] })).json, {
      tokens: [[97], [98, 99]],
      count: [1, 2],
      max_model_len: 512
    })
    t.same(
      (await call(`${url}${prefix}/detokenize`, { tokens: [97, 2, 98] })).json,
      { text: 'ab', prompt: 'a\u0002b' },
      "vLLM's field has special tokens, too"
    )
    t.same((await call(`${url}${prefix}/detokenize`, { tokens: [[97], [98]] })).json.text, ['a', 'b'])
  }
  t.equal((await call(`${url}/detokenize`, { tokens: [97, 2], skip_special_tokens: false })).json.text, 'a\u0002')
  t.same(
    (await call(`${url}/tokenize`, { messages: [{ role: 'u', content: 'x' }], add_generation_prompt: false }))
      .json
      .tokens,
    [...Buffer.from('u:x\n')]
  )
  t.same((await call(`${url}/detokenize`, { tokens: [] })).json.text, '')
  t.match(
    (await call(`${url}/detokenize`, { tokens: [300] })).json.message,
    /^tokens: expected token ids from 0 to 299, got 300$/
  )
  t.match((await call(`${url}/tokenize`, {})).json.message, /exactly one of prompt and messages/)
})

t.test("metrics have refit's names and those of the process, in one registry per plugin", async t => {
  const { url } = await routeApp(t)
  const second = await routeApp(t, { engine: new FakeEngine({ info: { servedModelName: 'second' } }) })
  await call(`${url}/generate`, { input_ids: [5], sampling_params: { max_new_tokens: 4 } })
  await call(`${url}/pause_generation`, {})
  const { text, headers } = await call(`${url}/metrics`)
  t.match(headers.get('content-type'), /^text\/plain; version=0\.0\.4/)
  for (
    const line of [
      'refit:request_success_total{finished_reason="length",model_name="fake"} 1',
      'refit:generation_tokens_total{model_name="fake"} 4',
      'refit:prompt_tokens_total{model_name="fake"} 1',
      'refit:time_to_first_token_seconds_count{model_name="fake"} 1',
      'refit:inter_token_latency_seconds_count{model_name="fake"} 3',
      'refit:e2e_request_latency_seconds_count{model_name="fake"} 1',
      'refit:num_requests_running{model_name="fake"} 0',
      'refit:generation_paused{model_name="fake"} 1',
      'refit:weight_version{model_name="fake"} Nan',
      'refit:request_queue_time_seconds_sum{model_name="fake"} 0.25',
      'refit:request_queue_time_seconds_count{model_name="fake"} 1',
      'refit:request_prefill_time_seconds_sum{model_name="fake"} 1.5',
      'refit:request_prefill_time_seconds_count{model_name="fake"} 1'
    ]
  ) t.match(text, line)
  t.match(text, /^process_resident_memory_bytes\{model_name="fake"\} \d/m)
  t.match(text, /^nodejs_eventloop_lag_seconds/m)
  const other = await call(`${second.url}/metrics`)
  t.notMatch(other.text, 'model_name="fake"')
  t.match(other.text, 'refit:generation_tokens_total{model_name="second"} 0')
  t.equal(
    (await call(`${url}/metrics`)).text.match(/^refit:generation_tokens_total.* 4$/gm)?.length,
    1,
    'a second scrape does not count twice'
  )
})

t.test('the metric of the weight version is the number at the end of the label', async t => {
  const { url, engine } = await routeApp(t)
  for (
    const [label, value] of [
      ['step-42', '42'],
      ['v9', '9'],
      ['007', '7'],
      ['3-of-8', '8'],
      ['1'.repeat(15), '1'.repeat(15)],
      ['42-final', 'Nan'],
      ['default', 'Nan']
    ] as const
  ) {
    engine.weightVersion = label
    const { text } = await call(`${url}/metrics`)
    t.match(text, `refit:weight_version{model_name="fake"} ${value}\n`, label)
  }
  t.match((await call(`${url}/metrics`)).text, /^# HELP refit:weight_version .*digits.*NaN if there are none$/m)
})
