import t from 'tap'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import { keptOf } from '../../helpers/fakes/fake-scores.ts'
import { call, frames, routeApp } from '../../helpers/route-app.ts'

// Every reply that can have a sampling mask. The fake engine repeats the prompt; an odd token is kept with the token
// before it, which is less likely: ids are the best first.

const LIMITED = { max_new_tokens: 4, top_k: 8 }
const lists = (tokens: number[]) => ({
  output_token_sampling_mask: tokens.map(token => Array.from(keptOf(token).ids)),
  output_token_sampling_logprobs: tokens.map(token => keptOf(token).logprob)
})
const int32 = (text: string): number[] => {
  const bytes = Buffer.from(text, 'base64')
  return Array.from({ length: bytes.length / 4 }, (_, i) => bytes.readInt32LE(i * 4))
}

t.test("SGLang's /generate sends the kept ids of each token and logprobs among them", async t => {
  const { url } = await routeApp(t)
  const body = { input_ids: [5, 6, 7], sampling_params: LIMITED }
  const { json } = await call(`${url}/generate`, { ...body, return_sampling_mask: true })
  t.same(json.output_ids, [5, 6, 7, 5])
  t.match(json.meta_info, lists([5, 6, 7, 5]))
  t.notOk('top_p_token_ids' in json.meta_info)
  const without = await call(`${url}/generate`, body)
  t.notOk('output_token_sampling_mask' in without.json.meta_info, 'not requested')
  const many = await call(`${url}/generate`, {
    input_ids: [[5, 6, 7], [8, 9]],
    return_sampling_mask: [false, true],
    sampling_params: { ...LIMITED, n: 2 }
  })
  t.same(many.json.map((output: any) => output.meta_info.output_token_sampling_mask), [
    undefined,
    undefined,
    lists([8, 9, 8, 9]).output_token_sampling_mask,
    lists([8, 9, 8, 9]).output_token_sampling_mask
  ])
  t.equal((await call(`${url}/generate`, { ...body, return_sampling_mask: [true, true] })).status, 400)
})

t.test('slime gets the same ids as base64 of int32', async t => {
  const { url } = await routeApp(t)
  const params = { ...LIMITED, top_k: -1, top_p: 0.9, custom_params: { return_top_p_token_ids: true } }
  const { json: { meta_info: meta } } = await call(`${url}/generate`, { input_ids: [5, 6, 7], sampling_params: params })
  t.same(int32(meta.top_p_token_ids), [5, 4, 6, 7, 6, 5, 4])
  t.same(int32(meta.top_p_token_offsets), [0, 2, 3, 5, 7])
  t.notOk('output_token_sampling_mask' in meta)
  const other = await call(`${url}/generate`, {
    input_ids: [5],
    sampling_params: { custom_params: { return_top_p_token_ids: true, thinking_budget: 5 } }
  })
  t.match(other.json, { message: /^sampling_params.custom_params: thinking_budget is not supported/ })
  const off = await call(`${url}/generate`, {
    input_ids: [5],
    sampling_params: { max_new_tokens: 1, custom_params: { return_top_p_token_ids: false } }
  })
  t.notOk('top_p_token_ids' in off.json.meta_info)
})

t.test('events of a stream have the masks of the tokens that they have', async t => {
  const { url } = await routeApp(t)
  const body = { input_ids: [5, 6, 7], sampling_params: LIMITED, return_sampling_mask: true, stream: true }
  for (const deltas of [false, true]) {
    const { text } = await call(`${url}/generate`, { ...body, stream_deltas: deltas })
    const events: any[] = frames(text).slice(0, -1)
    t.equal(events.length, 4)
    for (const { output_ids: ids, meta_info: meta } of events) t.match(meta, lists(ids))
    t.same(events.at(-1).output_ids, deltas ? [5] : [5, 6, 7, 5])
  }
})

t.test('a stop string cuts the masks with the tokens', async t => {
  const engine = new FakeEngine()
  engine.tokensPerEvent = 4
  const { url } = await routeApp(t, { engine })
  const { json } = await call(`${url}/generate`, {
    input_ids: [97, 98, 99],
    return_sampling_mask: true,
    sampling_params: { ...LIMITED, stop: 'b' }
  })
  t.same(json.output_ids, [97, 98])
  t.same(json.meta_info.output_token_sampling_mask, [[97, 96], [98]])
  t.same(json.meta_info.output_token_sampling_logprobs, [-97 / 1024, -98 / 1024])
})

t.test('chat sends masks in the meta_info of each choice', async t => {
  const { url } = await routeApp(t)
  const body = {
    messages: [{ role: 'user', content: 'a' }],
    max_tokens: 3,
    top_k: 8,
    n: 2,
    logprobs: true,
    return_meta_info: true
  }
  const { json } = await call(`${url}/v1/chat/completions`, { ...body, return_sampling_mask: true })
  const tokens = [...Buffer.from('use')]
  for (const { meta_info: meta } of json.choices) {
    t.match(meta, { ...lists(tokens), completion_tokens: 3 })
    t.same(meta.output_token_logprobs, tokens.map(token => [-token / 100, token, String.fromCharCode(token)]))
  }
  const bare = await call(`${url}/v1/chat/completions`, body)
  t.notOk('output_token_sampling_mask' in bare.json.choices[0].meta_info)
  for (
    const [refused, param] of [
      [{ return_meta_info: false, return_sampling_mask: true }, 'return_sampling_mask'],
      [{ stream: true }, 'return_meta_info']
    ] as const
  ) {
    const reply = await call(`${url}/v1/chat/completions`, { ...body, ...refused })
    t.match(reply, { status: 400, json: { error: { param } } })
  }
})

t.test("vLLM's route sends masks on servers with --enable-return-sampling-mask", async t => {
  const body = { token_ids: [5, 6, 7], sampling_params: { max_tokens: 4, top_p: 0.9, n: 2 } }
  const { url, engine } = await routeApp(t, { samplingMasks: true })
  const masks = async (more: object = {}, address = url) =>
    (await call(`${address}/inference/v1/generate`, { ...body, ...more }))
      .json
      .choices
      .map((choice: any) => choice.sampling_mask)
  const expected = lists([5, 6, 7, 5]).output_token_sampling_mask
  t.same(await masks(), [expected, expected])
  t.same(await masks({ sampling_params: { max_tokens: 4, temperature: 0 } }), [expected], 'greedy')
  for (const bound of [{ top_k: 5 }, { top_p: 0.5 }, { min_p: 0.1 }]) {
    t.same(await masks({ sampling_params: { max_tokens: 4, ...bound } }), [expected], JSON.stringify(bound))
  }
  t.same(await masks({ sampling_params: { max_tokens: 4 } }), [null], 'nothing bounds it')
  t.notOk(engine.requests.at(-1)!.kept)
  const { text } = await call(`${url}/inference/v1/generate`, { ...body, stream: true })
  const events: any[] = frames(text).slice(0, -1)
  t.ok(events.every(({ choices }) => choices[0].sampling_mask === null), 'not in streams')
  t.same(await masks({}, (await routeApp(t)).url), [null, null])
})

t.test("vLLM's route sends logprobs among the kept ids where they are reported, whole and streamed", async t => {
  const { url } = await routeApp(t, { samplingMasks: true })
  const bare = (await routeApp(t)).url
  const body = { token_ids: [5, 6], sampling_params: { max_tokens: 2, top_k: 5, logprobs: 2, logprob_token_ids: [4] } }
  const logprobs = async (address: string, more: object = {}) => {
    const { text } = await call(`${address}/inference/v1/generate`, { ...body, ...more })
    const replies = 'stream' in more ? frames(text).slice(0, -1) : [JSON.parse(text)]
    return replies.flatMap(({ choices }: any) => choices[0].logprobs.content)
  }
  const own = (entries: any[]) => entries.map(({ logprob }) => logprob)
  const among = [5, 6].map(token => keptOf(token).logprob)
  const [first] = await logprobs(url)
  const shown = Object.fromEntries(first.top_logprobs.map((entry: any) => [entry.token_id, entry.logprob]))
  t.match(shown, { 5: among[0], 6: -9999 })
  t.ok(Math.abs(shown[4] - (among[0]! - 0.04 + 0.05)) < 1e-9 || shown[4] === 0, 'the same shift for every kept id')
  for (const more of [{}, { stream: true }, { output_mode: 'text' }]) {
    t.same(own(await logprobs(url, more)), among, JSON.stringify(more))
    t.same(own(await logprobs(bare, more)), [-5 / 100, -6 / 100], 'without masks')
  }
})
