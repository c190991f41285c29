import { Writable } from 'node:stream'
import Fastify from 'fastify'
import { pino } from 'pino'
import t from 'tap'
import refit from '../../../src/app/plugin.ts'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import { call, routeApp } from '../../helpers/route-app.ts'

/** Generates a sample and returns the engine's logprobs. */
async function sample (url: string, rid: string, tokens = 4): Promise<number[]> {
  const { json } = await call(`${url}/generate`, {
    input_ids: [205, 206],
    rid,
    sampling_params: { max_new_tokens: tokens },
    return_logprob: true,
    receipt: true
  })
  return json.meta_info.output_token_logprobs.map(([logprob]: [number]) => logprob)
}

t.test("a trainer's logprobs are compared by weight version, and reported in /truth and /metrics", async t => {
  const { url, engine } = await routeApp(t)
  const first = await sample(url, 'a')
  const equal = await call(`${url}/truth`, { samples: [{ id: 'a', logprobs: first }] })
  t.match(equal, { status: 200, json: { samples: 1, tokens: 4, mean: 0, max: 0, p99: 0, kl: 0, clipped: 0 } })
  engine.weightVersion = 'step-1'
  const second = await sample(url, 'b')
  const third = await sample(url, 'c')
  const shifted = await call(`${url}/truth`, {
    samples: [
      { id: 'b', logprobs: second.map(value => value - 0.25) },
      { id: 'c', logprobs: third.map((value, i) => i === 0 ? value + 1 : value) },
      { id: 'nobody', logprobs: [-1] }
    ]
  })
  t.same(shifted.json.unknown, ['nobody'])
  t.match(shifted.json.versions, [{ version: 'step-1', tokens: 8 }])
  t.ok(Math.abs(shifted.json.mean - (4 * 0.25 + 1) / 8) < 1e-9)
  t.ok(Math.abs(shifted.json.kl - (4 * (Math.exp(-0.25) - 1 + 0.25) + Math.E - 2) / 8) < 1e-9)
  t.equal(shifted.json.clipped, 1 / 8)
  t.ok(Math.abs(shifted.json.max - 1) < 1e-9)
  const { json } = await call(`${url}/truth`)
  t.match(json, { samples: 3, tokens: 12, warnings: 0 })
  t.same(json.versions.map(({ version, tokens }: { version: string, tokens: number }) => [version, tokens]), [
    ['default', 4],
    ['step-1', 8]
  ])
  const { text } = await call(`${url}/metrics`)
  for (
    const line of [
      /^refit:truth_samples_total{model_name="fake"} 3$/m,
      /^refit:truth_tokens_total{model_name="fake"} 12$/m,
      /^refit:truth_clipped_ratio{model_name="fake"} 0\.125$/m,
      /^refit:truth_difference_mean{model_name="fake"} 0\.25/m
    ]
  ) t.match(text, line)
  t.notMatch(text, /refit:truth_\S*version/, 'no label grows with the versions')
})

t.test('a retried report counts once, and tokens count for the version that made them', async t => {
  const engine = new FakeEngine({ stepMs: 5 })
  const { url } = await routeApp(t, { engine })
  const running = sample(url, 'a', 20)
  while (engine.stats.running === 0) await new Promise(resolve => setTimeout(resolve, 1))
  engine.weightVersion = 'next'
  const logprobs = await running
  const body = { samples: [{ id: 'a', logprobs }, { id: 'a', logprobs }] }
  const once = await call(`${url}/truth`, body)
  t.match(once.json, { samples: 1, repeated: 1, tokens: 20 })
  t.equal(once.json.versions.reduce((sum: number, { tokens }: { tokens: number }) => sum + tokens, 0), 20)
  t.equal(once.json.versions.at(-1).version, 'next')
  t.match((await call(`${url}/truth`, body)).json, { samples: 0, repeated: 2, tokens: 0 })
  t.match((await call(`${url}/truth`)).json, { samples: 1, tokens: 20 })
})

t.test('only the last 16 versions are reported one by one', async t => {
  const { url, engine } = await routeApp(t)
  for (let i = 0; i < 20; i++) {
    engine.weightVersion = `v${i}`
    await call(`${url}/truth`, { samples: [{ id: `s${i}`, logprobs: await sample(url, `s${i}`, 1) }] })
  }
  const { json } = await call(`${url}/truth`)
  t.same(
    json.versions.map(({ version }: { version: string }) => version),
    Array.from({ length: 16 }, (_, i) => `v${i + 4}`)
  )
  t.equal(json.tokens, 20)
})

t.test('claims that do not fit their samples are refused, and nothing is counted', async t => {
  const { url } = await routeApp(t)
  const good = await sample(url, 'a')
  await call(`${url}/generate`, { input_ids: [5], rid: 'plain', receipt: true })
  for (
    const [claim, message] of [
      [{ id: 'a', logprobs: [-1] }, /samples\[1\]\.logprobs: sample "a" has 4 output tokens, got 1 logprobs/],
      [
        { id: 'a', logprobs: [...good.slice(0, 3), 0.7] },
        /samples\[1\]\.logprobs: sample "a" has a logprob of at most 0 at 3, got 0\.7: send log p/
      ],
      [{ id: 'plain', logprobs: [] }, /was generated without "return_logprob"/],
      [
        { id: 'a', logprobs: good, output_ids: [205, 206, 205, 207] },
        /samples\[1\]\.output_ids: sample "a" has other tokens here: token 3 is 206, got 207/
      ],
      [{ id: 'a', logprobs: good, output_ids: [205] }, /token 1 is 206, got nothing/]
    ] as const
  ) {
    const reply = await call(`${url}/truth`, { samples: [{ id: 'a', logprobs: good }, claim] })
    t.equal(reply.status, 400)
    t.match(reply.json.message, message)
  }
  t.equal((await call(`${url}/truth`, { samples: [] })).status, 400)
  t.equal((await call(`${url}/truth`, { samples: [{ id: 'a', logprobs: ['x'] }] })).status, 400)
  t.equal((await call(`${url}/truth`, { sample: [] })).status, 400)
  const infinite = '{"samples": [{"id": "a", "logprobs": [-1e999, 0, 0, 0]}]}'
  const headers = { 'content-type': 'application/json' }
  t.equal((await call(`${url}/truth`, undefined, { method: 'POST', body: infinite, headers })).status, 400)
  t.match(await call(`${url}/truth`, { samples: [{ id: 'gone', logprobs: [] }] }), {
    status: 404,
    json: { error: { code: 'NOT_FOUND', message: /no sample "gone" is kept; .*"receipt": true/ } }
  })
  t.match((await call(`${url}/truth`)).json, { samples: 0, tokens: 0 })
})

t.test('a mean above --truth-warn is logged and counted', async t => {
  const lines: Record<string, any>[] = []
  const stream = new Writable({
    write: (chunk, _encoding, done) => {
      lines.push(JSON.parse(String(chunk)))
      done()
    }
  })
  const engine = new FakeEngine()
  const app = Fastify({ loggerInstance: pino({ level: 'warn' }, stream), forceCloseConnections: true })
  await app.register(refit, { engine, tokenizer: null, truthWarn: 0.1 })
  const url = await app.listen({ port: 0 })
  t.teardown(async () => await app.close())
  for (const [id, shift] of [['a', 0.05], ['b', 0.2]] as const) {
    const logprobs = (await sample(url, id)).map(value => value - shift)
    t.equal((await call(`${url}/truth`, { samples: [{ id, logprobs }] })).status, 200)
  }
  const warnings = lines.filter(({ msg }) => /truth-warn/.test(msg))
  t.match(warnings, [{ level: 40, msg: /differ from the engine's by 0\.2000 on average/, truth: { tokens: 4 } }])
  t.equal(warnings.length, 1)
  t.equal((await call(`${url}/truth`)).json.warnings, 1)
})
