import t from 'tap'
import { fakeScore } from '../../helpers/fakes/fake-scores.ts'
import { call, routeApp } from '../../helpers/route-app.ts'

// Chosen ids at each position of a prompt, as vLLM and SGLang score them.

const VLLM = '/inference/v1/generate'

/** The rows of a .npy file. */
function rowsOf (base64: string): number[][] {
  const bytes = Buffer.from(base64, 'base64')
  const begin = 10 + bytes.readUInt16LE(8)
  const [, rows, columns] = /'descr': '<f4'.*'shape': \((\d+), (\d+)\)/.exec(bytes.toString('latin1', 10, begin))!
  if (bytes.length !== begin + 4 * Number(rows) * Number(columns)) throw new Error('not the bytes of its shape')
  return Array.from(
    { length: Number(rows) },
    (_, row) =>
      Array.from({ length: Number(columns) }, (_, i) => bytes.readFloatLE(begin + 4 * (row * Number(columns) + i)))
  )
}

const score = (position: number, id: number): number => id < 0 ? -Infinity : fakeScore(position, id)

t.test("vLLM's matrix has a row per position, and -Infinity where a row is filled up with -1", async t => {
  const { url, engine } = await routeApp(t)
  const matrix = async (fields: object): Promise<number[][]> => {
    const reply = await call(url + VLLM, { token_ids: [5, 6, 7, 8], sampling_params: { max_tokens: 1, ...fields } })
    t.equal(reply.status, 200, reply.text)
    t.equal(reply.json.choices[0].token_ids.length, 1)
    return rowsOf(reply.json.prompt_token_id_logprobs)
  }
  t.same(await matrix({ prompt_logprob_token_ids: [[3, 4], [9, -1], [7, 1]] }), [
    [score(1, 3), score(1, 4)],
    [score(2, 9), -Infinity],
    [score(3, 7), score(3, 1)]
  ])
  t.same(await matrix({ prompt_logprob_token_ids: [[3], [4, 5]], prompt_logprob_start: 1 }), [
    [score(2, 3), -Infinity],
    [score(3, 4), score(3, 5)]
  ], 'from row 1 on')
  t.same(await matrix({ prompt_logprob_token_ids: [3, 4], prompt_logprob_start: 1, n: 1, logprobs: 1 }), [
    [score(2, 3), score(2, 4)],
    [score(3, 3), score(3, 4)]
  ], 'one list for all rows')
  t.equal(engine.requests.at(-1)!.logprobs!.startLen, null, 'no scores as JSON')
  const several = await call(url + VLLM, {
    token_ids: [5, 6],
    sampling_params: { max_tokens: 0, n: 2, prompt_logprob_token_ids: [[3]] }
  })
  t.same(rowsOf(several.json.prompt_token_id_logprobs), [[score(1, 3)]])
  t.same(engine.requests.slice(-2).map(({ scores }) => scores === undefined), [false, true], 'once for all samples')
  const without = await call(url + VLLM, { token_ids: [5, 6], sampling_params: { max_tokens: 1 } })
  t.equal(without.json.prompt_token_id_logprobs, null)
})

t.test('rows that do not fit the prompt are refused by name', async t => {
  const { url, engine } = await routeApp(t)
  const ids = 'sampling_params.prompt_logprob_token_ids'
  const start = 'sampling_params.prompt_logprob_start'
  for (
    const [fields, param, message, more] of [
      [{ prompt_logprob_token_ids: [[1]] }, ids, /expected 2 rows: 3 prompt tokens - 1 - the start, 0; got 1/],
      [
        { prompt_logprob_token_ids: [[1]], prompt_logprob_start: 2 },
        start,
        /at most 1 for a prompt of 3 tokens, got 2/
      ],
      [{ prompt_logprob_token_ids: [[], []] }, ids, /has no ids/],
      [{ prompt_logprob_token_ids: [] }, ids, /cannot be empty/],
      [{ prompt_logprob_start: 1 }, start, /needs prompt_logprob_token_ids/],
      [{ prompt_logprob_token_ids: [[1], [1]] }, ids, /not possible in a stream/, { stream: true }]
    ] as const
  ) {
    const params = { max_tokens: 1, ...fields }
    const reply = await call(url + VLLM, { token_ids: [5, 6, 7], sampling_params: params, ...more })
    t.match(reply, { status: 400, json: { error: { param, message } } })
  }
  t.equal(engine.requests.length, 0)
})

t.test("SGLang's positions score lists of different lengths, empty ones too", async t => {
  const { url } = await routeApp(t)
  const body = {
    input_ids: [5, 6, 7, 8],
    sampling_params: { max_new_tokens: 0 },
    return_logprob: true,
    logprob_start_len: 0,
    token_ids_logprob_positions: [[], [], [3, 4], [9]]
  }
  const { json: { meta_info: meta } } = await call(`${url}/generate`, body)
  const triple = (position: number, id: number) => [score(position, id), id, null]
  t.same(meta.input_token_ids_logprobs, [null, [], [triple(2, 3), triple(2, 4)], [triple(3, 9)]])
  t.same(meta.input_token_logprobs.slice(1), [6, 7, 8].map(id => [-id / 100, id, null]))
  t.equal(meta.completion_tokens, 0)
  const later = await call(`${url}/generate`, { ...body, logprob_start_len: 3 })
  t.same(later.json.meta_info.input_token_ids_logprobs, [[triple(3, 9)]])
  for (
    const [fields, message] of [
      [{ token_ids_logprob_positions: [[1]] }, /expected 4 lists, one per prompt token, got 1/],
      [{ token_ids_logprob: [1] }, /not possible together with token_ids_logprob/],
      [{ logprob_start_len: -1 }, /needs "return_logprob": true and logprob_start_len/],
      [{ input_ids: [[5], [6]] }, /one prompt only/]
    ] as const
  ) {
    const reply = await call(`${url}/generate`, { ...body, ...fields })
    t.equal(reply.status, 400)
    t.match(reply.json.message, message)
  }
})
