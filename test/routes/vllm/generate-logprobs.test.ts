import t from 'tap'
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

t.test('a token that is not among the best has the rank after them', async t => {
  const engine = new FakeEngine()
  const original = engine.generate.bind(engine)
  engine.generate = async function* (request) {
    for await (const event of original(request)) {
      yield event.input === null
        ? event
        : {
          ...event,
          input: {
            ...event.input,
            top: event
              .input
              .top
              .map(row => row === null ? null : [[-0.001, 1], [-Infinity, 4]])
          }
        }
    }
  }
  const { url } = await routeApp(t, { engine })
  const { prompt_logprobs: scores } =
    (await call(url + PATH, { token_ids: [5, 8], sampling_params: { max_tokens: 1, prompt_logprobs: 2 } })).json
  t.same(scores[1], {
    1: { logprob: -0.001, rank: 1, decoded_token: null },
    4: { logprob: -9999, rank: 2, decoded_token: null },
    8: { logprob: -0.08, rank: 3, decoded_token: null }
  })
})
