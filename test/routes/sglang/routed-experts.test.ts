import t from 'tap'
import { joinRegex } from '../../helpers/join-regex.ts'
import type { Test } from 'tap'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import { fakeExperts } from '../../helpers/fakes/fake-experts.ts'
import { call, frames, routeApp } from '../../helpers/route-app.ts'
import type { RouteApp } from '../../helpers/route-app.ts'

// Every reply that can have routed experts, byte for byte. Layer 1 of 3 has none.

const LAYOUT = { layers: 3, sparse: [0, 2], experts: 8, perToken: 2 }
const MOE = 'Qwen3MoeForCausalLM'

async function app (t: Test, experts = LAYOUT, options: object = {}): Promise<RouteApp> {
  return await routeApp(t, { engine: new FakeEngine({ info: { architecture: MOE, experts } }), ...options })
}

/** [to - from, layers, experts per token], zeros in layers without experts. */
function rows (from: number, to: number, layout = LAYOUT): number[] {
  const { layers, sparse, perToken } = layout
  const recorded = fakeExperts(layout, from, to)
  return Array
    .from({ length: to - from }, (_, row) =>
      Array
        .from({ length: layers }, (_, layer) =>
          Array.from({ length: perToken }, (_, j) => {
            const at = sparse.indexOf(layer)
            return at < 0 ? 0 : recorded[(row * sparse.length + at) * perToken + j]!
          })))
    .flat(2)
}

const int32 = (text: string): number[] => {
  const bytes = Buffer.from(text, 'base64')
  return Array.from({ length: bytes.length / 4 }, (_, i) => bytes.readInt32LE(i * 4))
}

t.test("SGLang's /generate sends int32 experts of all tokens of a sample but the last, from a position on", async t => {
  const { url, engine } = await app(t)
  const one = await call(`${url}/generate`, {
    input_ids: [5, 6, 7],
    return_routed_experts: true,
    sampling_params: { max_new_tokens: 4 }
  })
  t.same(int32(one.json.meta_info.routed_experts), rows(0, 6))
  t.equal(one.json.meta_info.routed_experts_start_len, 0)
  const many = await call(`${url}/generate`, {
    input_ids: [[5, 6, 7], [8, 9, 9, 9]],
    return_routed_experts: true,
    routed_experts_start_len: 2,
    sampling_params: { max_new_tokens: 2, n: 2 }
  })
  t.same(many.json.map((output: any) => int32(output.meta_info.routed_experts)), [
    rows(2, 4),
    rows(2, 4),
    rows(2, 5),
    rows(2, 5)
  ])
  t.same(many.json.map((output: any) => output.meta_info.routed_experts_start_len), [2, 2, 2, 2])
  const score = await call(`${url}/generate`, {
    input_ids: [5, 6, 7],
    return_routed_experts: true,
    sampling_params: { max_new_tokens: 0 }
  })
  t.same(int32(score.json.meta_info.routed_experts), rows(0, 2))
  const none = await call(`${url}/generate`, {
    input_ids: [5, 6, 7],
    routed_experts_start_len: 1,
    return_routed_experts: false,
    sampling_params: { max_new_tokens: 1 }
  })
  t.notOk('routed_experts' in none.json.meta_info)
  t.equal(engine.requests.at(-1)!.expertsFrom, undefined)
})

t.test('a stream has the experts on its last event', async t => {
  const { url } = await app(t)
  const { text } = await call(`${url}/generate`, {
    input_ids: [5, 6, 7],
    stream: true,
    return_routed_experts: true,
    sampling_params: { max_new_tokens: 3 }
  })
  const events = frames(text).slice(0, -1)
  t.same(events.map(event => 'routed_experts' in event.meta_info), events.map((_, i) => i === events.length - 1))
  t.same(int32(events.at(-1).meta_info.routed_experts), rows(0, 5))
})

t.test('a stop text cuts the experts with the tokens', async t => {
  const { url, engine } = await app(t)
  engine.tokensPerEvent = 3
  const { json } = await call(`${url}/generate`, {
    text: 'abcdef',
    return_routed_experts: true,
    routed_experts_start_len: 1,
    sampling_params: { max_new_tokens: 200, stop: ['d'] }
  })
  t.same(json.output_ids, Array.from('abcd', char => char.charCodeAt(0)))
  t.match(json.meta_info.finish_reason, { type: 'stop', matched: 'd' })
  t.same(int32(json.meta_info.routed_experts), rows(1, 6 + 4 - 1))
  t.equal(engine.live, 0)
})

t.test('refusals give advice, and nothing is generated', async t => {
  const { url, engine } = await app(t)
  const far = await call(`${url}/generate`, {
    input_ids: [[5, 6, 7], [5]],
    return_routed_experts: true,
    routed_experts_start_len: 2
  })
  t.match([far.status, far.json.message], [
    400,
    /^routed_experts_start_len: 2 is higher than the number of input tokens 1/
  ])
  t.equal(
    (await call(`${url}/generate`, { input_ids: [5], return_routed_experts: true, routed_experts_start_len: -1 }))
      .status,
    400
  )
  t.equal(engine.requests.length, 0)
  const plain = await routeApp(t, { engine: new FakeEngine({ info: { architecture: MOE } }) })
  const dense = await routeApp(t)
  for (
    const [path, body] of Object.entries({
      '/generate': { input_ids: [5] },
      '/v1/completions': { prompt: [5] },
      '/v1/chat/completions': { messages: [{ role: 'user', content: 'a' }] },
      '/inference/v1/generate': { token_ids: [5] }
    })
  ) {
    const off = await call(plain.url + path, { ...body, return_routed_experts: true })
    t.match([off.status, off.json.error.code, off.text], [
      400,
      'UNSUPPORTED',
      joinRegex(
        /return_routed_experts: routed experts are not recorded by this engine; start the server with/,
        / --enable-return-routed-experts/
      )
    ], path)
    const none = await call(dense.url + path, { ...body, return_routed_experts: true })
    t.match([none.status, none.json.error.code, none.text], [
      400,
      'UNSUPPORTED',
      joinRegex(
        /return_routed_experts: routed experts of Qwen3ForCausalLM are not supported by this server: it/,
        / is no mixture of experts/
      )
    ], path)
  }
  t.equal(plain.engine.requests.length + dense.engine.requests.length, 0)
})

t.test('/server_info and /capabilities report whether experts are recorded', async t => {
  const { url } = await app(t)
  t.equal((await call(`${url}/server_info`)).json.enable_return_routed_experts, true)
  t.same((await call(`${url}/capabilities`)).json.model.routed_experts, {
    layers: 3,
    sparse_layers: [0, 2],
    experts: 8,
    per_token: 2
  })
  const plain = await routeApp(t)
  t.equal((await call(`${plain.url}/server_info`)).json.enable_return_routed_experts, false)
  t.equal((await call(`${plain.url}/capabilities`)).json.model.routed_experts, null)
})

for (
  const [path, prompt] of [['/v1/completions', { prompt: [5, 6, 7] }], ['/v1/chat/completions', {
    messages: [{ role: 'user', content: 'hi' }],
    return_token_ids: true
  }]] as const
) {
  t.test(`${path} has SGLang's extension, for each choice if there are several`, async t => {
    const { url } = await app(t)
    const one = await call(url + path, { ...prompt, max_tokens: 2, return_routed_experts: true })
    const length = one.json.usage.prompt_tokens + 1
    t.same(int32(one.json.sglext.routed_experts), rows(0, length))
    t.notOk('sglext' in one.json.choices[0])
    const two = await call(url + path, {
      ...prompt,
      max_tokens: 2,
      n: 2,
      return_routed_experts: true,
      routed_experts_start_len: 1
    })
    t.same([two.json, ...two.json.choices].map(one => int32(one.sglext.routed_experts)), [
      rows(1, length),
      rows(1, length),
      rows(1, length)
    ])
    t.notOk('sglext' in (await call(url + path, { ...prompt, max_tokens: 2 })).json)

    const { text } = await call(url + path, {
      ...prompt,
      max_tokens: 2,
      stream: true,
      return_routed_experts: true,
      stream_options: { include_usage: true }
    })
    const events = frames(text).slice(0, -1)
    t.same(
      events.map(event => [event.choices.length, 'sglext' in event]).slice(-2),
      [[0, true], [0, false]],
      'one chunk of its own, before the usage'
    )
    t.same(int32(events.at(-2).sglext.routed_experts), rows(0, length))
  })
}

t.test("vLLM's /inference/v1/generate always sends experts, as .npy files", async t => {
  const { url } = await app(t)
  const generate = async (url: string, extra: object = {}): Promise<any> =>
    (await call(`${url}/inference/v1/generate`, { token_ids: [5, 6, 7], sampling_params: { max_tokens: 3 }, ...extra }))
      .json
  const npy = (text: string): { header: string, values: number[] } => {
    const bytes = Buffer.from(text, 'base64')
    t.equal(bytes.toString('latin1', 0, 8), '\x93NUMPY\x01\x00')
    const begin = 10 + bytes.readUInt16LE(8)
    t.equal(begin % 64, 0)
    const header = bytes.toString('latin1', 10, begin)
    return {
      header: header.trimEnd(),
      values: header.includes('<u2')
        ? Array.from({ length: (bytes.length - begin) / 2 }, (_, i) => bytes.readUInt16LE(begin + i * 2))
        : [...bytes.subarray(begin)]
    }
  }
  t.same(npy((await generate(url)).choices[0].routed_experts), {
    header: "{'descr': '|u1', 'fortran_order': False, 'shape': (5, 3, 2), }",
    values: rows(0, 5)
  })
  const late = await generate(url, {
    sampling_params: { max_tokens: 3, n: 2, routed_experts_prompt_start: 2 },
    return_routed_experts: true
  })
  for (const choice of late.choices) t.same(npy(choice.routed_experts).values, rows(2, 5))
  t.match((await generate(url, { sampling_params: { routed_experts_prompt_start: 4 } })).error, {
    code: 'INVALID_REQUEST',
    param: 'sampling_params.routed_experts_prompt_start'
  })
  const wide = { ...LAYOUT, experts: 300 }
  t.same(npy((await generate((await app(t, wide)).url)).choices[0].routed_experts), {
    header: "{'descr': '<u2', 'fortran_order': False, 'shape': (5, 3, 2), }",
    values: rows(0, 5, wide)
  })

  const { text } = await call(`${url}/inference/v1/generate`, {
    token_ids: [5, 6, 7],
    stream: true,
    sampling_params: { max_tokens: 3 }
  })
  const choices = frames(text).slice(0, -1).map(event => event.choices[0])
  t.same(choices.map(choice => choice.routed_experts !== null), choices.map(choice => choice.finish_reason !== null))
  t.same(npy(choices.at(-1).routed_experts).values, rows(0, 5))
})

t.test("prime-rl's and SkyRL's replies have objects, with the smallest dtype that holds the ids", async t => {
  const body = {
    token_ids: [...Array(30).keys()].map(i => i + 5),
    sampling_params: { max_tokens: 2, routed_experts_prompt_start: 3 }
  }
  const wide = { ...LAYOUT, experts: 300 }
  t.ok(rows(3, 31, wide).some(id => id > 255))
  for (const [layout, dtypes] of [[LAYOUT, ['uint8', 'uint8']], [wide, ['uint16', 'int16']]] as const) {
    const prime = await app(t, layout, { dialects: ['prime-rl'] })
    const { text, json } = await call(`${prime.url}/inference/v1/generate`, body)
    t.ok(text.includes('"routed_experts":{"data":"'), 'which its client looks for')
    const { url } = await app(t, layout)
    const skyrl = (await call(`${url}/skyrl/v1/generate`, body)).json
    for (const [i, { data, ...rest }] of [json, skyrl].map(reply => reply.choices[0].routed_experts).entries()) {
      t.same(rest, { shape: [28, 3, 2], ...i === 0 ? { start: 3 } : {}, dtype: dtypes[i] })
      const bytes = Buffer.from(data, 'base64')
      t.same(
        dtypes[i] === 'uint8'
          ? [...bytes]
          : Array.from({ length: bytes.length / 2 }, (_, j) => bytes.readUInt16LE(j * 2)),
        rows(3, 31, layout)
      )
    }
  }
  // Ids are sent in 8 bits if all of them fit, however many experts there are: SkyRL reads nothing wider.
  const { url } = await app(t, wide)
  t.equal(
    (await call(`${url}/skyrl/v1/generate`, { token_ids: [5, 6], sampling_params: { max_tokens: 1 } }))
      .json
      .choices[0]
      .routed_experts
      .dtype,
    'uint8'
  )
})
