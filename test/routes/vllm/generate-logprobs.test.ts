import t from 'tap'
import type { Scored } from '../../../src/contract/rollout-engine.ts'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import { call, routeApp } from '../../helpers/route-app.ts'

const PATH = '/inference/v1/generate'

t.test('the best tokens follow the token itself, each once, with their ranks', async t => {
  const { url } = await routeApp(t)
  const [choice] = (await call(url + PATH, {
    token_ids: [5, 6],
    sampling_params: { max_tokens: 1, logprobs: 2, prompt_logprobs: 1, logprob_token_ids: [5, 9, 6] }
  }))
    .json
    .choices
  t.same(choice.logprobs.content, [{
    token: 'token_id:5',
    token_id: 5,
    logprob: -0.05,
    rank: 1,
    top_logprobs: [
      { token: 'token_id:5', token_id: 5, logprob: -0.05, rank: 1 },
      { token: 'token_id:6', token_id: 6, logprob: -0.06, rank: 2 },
      { token: 'token_id:9', token_id: 9, logprob: -0.09, rank: null }
    ]
  }])
})

t.test("prompts are scored in vLLM's form, separately from outputs", async t => {
  const { url, engine } = await routeApp(t)
  const reply = async (params: object) =>
    (await call(url + PATH, { token_ids: [5, 8, 7], sampling_params: { max_tokens: 1, ...params } })).json
  const one = await reply({ prompt_logprobs: 1 })
  const score = (id: number, rank: number) => ({ logprob: -id / 100, rank, decoded_token: null })
  t.same(one.prompt_logprobs, [null, { 8: score(8, 1) }, { 7: score(7, 1) }])
  t.equal(one.choices[0].logprobs, null, 'not requested')
  t.match(engine.requests[0]!.logprobs, { startLen: 0, top: 1 })
  const zero = await reply({ prompt_logprobs: 0, logprobs: 2 })
  t.same(zero.prompt_logprobs, [null, { 8: score(8, 1) }, { 7: score(7, 1) }], 'each token by itself')
  t.equal(zero.choices[0].logprobs.content[0].top_logprobs.length, 2)
  const more = await reply({ prompt_logprobs: 3, logprobs: 1 })
  t.same(Object.keys(more.prompt_logprobs[1]), ['8', '9', '10'])
  t.equal(more.choices[0].logprobs.content[0].top_logprobs.length, 1, 'outputs have as many as were requested')
  const all = await reply({ prompt_logprobs: -1 })
  t.equal(Object.keys(all.prompt_logprobs[1]).length, 300)
  const scored = await reply({ prompt_logprobs: 1, max_tokens: 0 })
  t.match(scored, { choices: [{ token_ids: [], finish_reason: 'length' }], prompt_logprobs: [null, {}, {}] })
})

/** An engine that finds these tokens best at every position of a prompt. */
function enginePreferring (best: Scored[]): FakeEngine {
  const engine = new FakeEngine()
  const original = engine.generate.bind(engine)
  engine.generate = async function* (request) {
    for await (const event of original(request)) {
      yield event.input === null
        ? event
        : { ...event, input: { ...event.input, top: event.input.top.map(row => row === null ? null : best) } }
    }
  }
  return engine
}

t.test('a token that is not among the best has the rank after them', async t => {
  const { url } = await routeApp(t, { engine: enginePreferring([[-0.001, 1], [-Infinity, 4]]) })
  const { prompt_logprobs: scores } =
    (await call(url + PATH, { token_ids: [5, 8], sampling_params: { max_tokens: 1, prompt_logprobs: 2 } })).json
  t.same(scores[1], {
    1: { logprob: -0.001, rank: 1, decoded_token: null },
    4: { logprob: -9999, rank: 2, decoded_token: null },
    8: { logprob: -0.08, rank: 3, decoded_token: null }
  })
})

t.test("the text of a reply has the prompt's own token first, then the others by rank", async t => {
  // Clients read the first entry: prime-rl, and AReaL's teacher on /v1/completions.
  const { url } = await routeApp(t, { engine: enginePreferring([[-0.1, 57], [-0.2, 52], [-0.3, 49]]) })
  const ids = [5, 52, 200]
  const scores = { max_tokens: 1, prompt_logprobs: 3 }
  for (
    const [path, body] of [
      [PATH, { token_ids: ids, sampling_params: scores }],
      ['/skyrl/v1/generate', { token_ids: ids, sampling_params: scores }],
      ['/v1/completions', { prompt: ids, ...scores, logprobs: 1, echo: true }]
    ] as const
  ) {
    const { text } = await call(url + path, body)
    const [, rows] = /"prompt_logprobs":\[null,(.*?\}\})\]/.exec(text)!
    t.same([...rows!.matchAll(/"(\d+)":\{"logprob":-([\d.]+),"rank":(\d)/g)].map(([, ...found]) => found.map(Number)), [
      ...[[52, 0.52, 2], [57, 0.1, 1], [49, 0.3, 3]],
      ...[[200, 2, 4], [57, 0.1, 1], [52, 0.2, 2], [49, 0.3, 3]]
    ], path)
  }
  const { text } = await call(`${url}/v1/chat/completions`, { messages: [{ role: 'user', content: '4' }], ...scores })
  t.match(text, /"52":\{[^}]*\},"57":\{[^}]*\},"49":/)
})

t.test('the best tokens of completions come in order, also where their texts are digits', async t => {
  const { url } = await routeApp(t, { engine: enginePreferring([[-0.1, 57], [-0.2, 52], [-0.3, 49]]) })
  const { text } = await call(`${url}/v1/completions`, { prompt: [5, 52, 56], echo: true, logprobs: 3, max_tokens: 0 })
  t.match(text, '"top_logprobs":[null,{"4":-0.2,"9":-0.1,"1":-0.3},{"8":-0.56,"9":-0.1,"4":-0.2,"1":-0.3}]')
})
