import t from 'tap'
import type { Test } from 'tap'
import type { Measured, Truth } from '../../src/http/samples/truth-schemas.ts'
import { joinReports, joinTruths } from '../../src/gateway/join-truths.ts'
import { ask, engineServer, gatewayTo, modelFolder } from '../helpers/gateway.ts'
import type { EngineServer, GatewayUnderTest } from '../helpers/gateway.ts'
import { call } from '../helpers/route-app.ts'

interface Pair {
  engines: [EngineServer, EngineServer]
  gateway: GatewayUnderTest
  /** Generates at one of the engines, through the gateway. Returns the engine's logprobs. */
  sample: (rid: string, at: number, tokens?: number) => Promise<number[]>
}

async function pair (t: Test): Promise<Pair> {
  const folder = modelFolder(t)
  const keys = { apiKey: 'engine-key', adminApiKey: 'engine-admin' }
  const engines: Pair['engines'] = [await engineServer(t, folder, keys), await engineServer(t, folder, keys)]
  const gateway = await gatewayTo(t, engines.map(({ url }) => url), { engineKeys: keys, healthMs: 3_600_000 })
  const sample: Pair['sample'] = async (rid, at, tokens = 4) => {
    const { status, body } = await gateway.post(
      '/generate',
      ask('1+2=', { rid, receipt: true, return_logprob: true }, {
        ...UNLIKELY,
        max_new_tokens: tokens,
        ignore_eos: true
      }),
      { 'x-data-parallel-rank': String(at) }
    )
    t.equal(status, 200)
    return body.meta_info.output_token_logprobs.map(([logprob]: [number]) => logprob)
  }
  return { engines, gateway, sample }
}

/** Tokens whose logprobs are far below 0. */
const UNLIKELY = { temperature: 5, sampling_seed: 1 }
const REPORT: Measured = {
  samples: 1,
  tokens: 4,
  mean: 1,
  max: 2,
  p99: 1.5,
  kl: 0.5,
  clipped: 0.25,
  unknown: [],
  repeated: 0,
  versions: []
}

t.test('a gateway over two engines', async t => {
  const { engines, gateway, sample } = await pair(t)
  const [a, b] = [await sample('a', 0), await sample('b', 1, 2)]

  await t.test('returns the receipt of the engine that generated the sample', async t => {
    for (const [id, engine] of [['a', 0], ['b', 1]] as const) {
      const { status, body } = await gateway.get(`/samples/${id}?digest=false`)
      t.equal(status, 200)
      const headers = { authorization: 'Bearer engine-key' }
      t.same(body, (await call(`${engines[engine]!.url}/samples/${id}?digest=false`, undefined, { headers })).json)
      t.equal(body.id, id)
    }
    t.match((await gateway.get('/samples/a')).body.weights.digest, /^[0-9a-f]{64}$/)
    t.equal((await gateway.get('/samples/a?digets=1')).status, 400, 'the engine checks the query')
    t.match(await gateway.get('/samples/nobody'), {
      status: 404,
      body: { error: { code: 'NOT_FOUND', message: /no engine keeps a sample "nobody".*--keep-samples/ }, param: 'id' }
    })
    t.same((await gateway.post('/samples/find', { ids: ['nobody', 'b', 'b'] })).body.samples.map(({ id }: any) => id), [
      'b'
    ])
  })

  await t.test('returns the newer of two samples with one id', async t => {
    await sample('twice', 1)
    await sample('twice', 0, 3)
    t.equal((await gateway.get('/samples/twice?digest=false')).body.output_ids.length, 3)
    await sample('twice', 1, 5)
    t.equal((await gateway.get('/samples/twice?digest=false')).body.output_ids.length, 5)
  })

  await t.test('counts nothing at the engine whose part is refused, and names the sample by its own place', async t => {
    const refused = await gateway.post('/truth', {
      samples: [{ id: 'nobody', logprobs: [-1] }, { id: 'a', logprobs: a }, { id: 'b', logprobs: [-1] }]
    })
    t.match(refused, {
      status: 400,
      body: { error: { message: /^samples\[2\]\.logprobs: sample "b" has 2/ }, param: 'samples[2].logprobs' }
    })
    t.match((await gateway.post('/truth', { samples: [{ id: 'a', logprobs: 'x' }] })).status, 400)
  })

  await t.test('sends each part of a report to the engine that generated it, and joins the replies', async t => {
    const samples = [
      { id: 'b', logprobs: b.map(value => value - 0.5) },
      { id: 'nobody', logprobs: [-1] },
      { id: 'a', logprobs: a.map(value => value + 1) },
      { id: 'b', logprobs: b }
    ]
    const { status, body } = await gateway.post('/truth', { samples })
    t.equal(status, 200)
    // The engine of a has counted it before, when b was refused.
    t.match(body, { samples: 1, tokens: 2, repeated: 2 })
    t.same(body.unknown, ['nobody'])
    t.match(body.versions, [{ version: 'default', tokens: 2 }])
    t.ok(Math.abs(body.mean - 0.5) < 1e-9)
    const c = await sample('c', 0)
    await gateway.post('/truth', { samples: [{ id: 'c', logprobs: c.map(value => value + 1) }] })
    const { body: all } = await gateway.get('/truth')
    t.match(all, { samples: 3, tokens: 10, max: Number, versions: [{ version: 'default', tokens: 10 }] })
    t.ok(Math.abs(all.mean - (4 * 0 + 2 * 0.5 + 4 * 1) / 10) < 1e-9)
    t.equal(all.clipped, 4 / 10)
    t.match(await gateway.post('/truth', { samples: [{ id: 'nobody', logprobs: [-1] }] }), {
      status: 404,
      body: { error: { message: /no engine keeps a sample "nobody"/ }, param: 'samples' }
    })
  })

  await t.test('names the engines that did not answer', async t => {
    await engines[1].kill()
    t.equal((await gateway.get('/samples/a?digest=false')).status, 200)
    t.match(await gateway.get('/samples/b'), {
      status: 404,
      body: { error: { message: new RegExp(`no engine keeps.*some did not answer: ${engines[1].url}: `) } }
    })
    t.match((await gateway.get('/truth')).body, { samples: 2, tokens: 8 })
    await engines[0].kill()
    t.match(await gateway.get('/samples/a'), { status: 502, body: { error: { code: 'ENGINE_FAILED' } } })
  })
})

t.test('reports are weighted by their tokens, and the joined 99th percentile is never too small', async t => {
  const other = { ...REPORT, tokens: 12, mean: 3, max: 1, p99: 0.5, kl: 0.1, clipped: 0, unknown: ['x'], repeated: 1 }
  t.same(joinReports([REPORT, other], ['y']), {
    samples: 2,
    tokens: 16,
    mean: 2.5,
    max: 2,
    p99: 1.5,
    kl: (4 * 0.5 + 12 * 0.1) / 16,
    clipped: 1 / 16,
    unknown: ['x', 'y'],
    repeated: 1,
    versions: []
  })
})

t.test('versions stay in their order, also those that only one engine has measured', async t => {
  const truth = (...versions: string[]): Truth => ({
    ...REPORT,
    warnings: 1,
    versions: versions.map(version => ({ ...REPORT, version }))
  })
  const { warnings, versions } = joinTruths([truth('1', '2', '4'), truth('2', '3', '4', '5'), truth('0', '1')])
  t.equal(warnings, 3)
  t.same(versions.map(({ version, tokens }) => [version, tokens]), [
    ['0', 4],
    ['1', 8],
    ['2', 8],
    ['3', 4],
    ['4', 8],
    ['5', 4]
  ])
  const many = Array.from({ length: 12 }, (_, i) => String(i))
  t.same(
    joinTruths([truth(...many), truth(...many.map(name => `${name}'`))]).versions.length,
    16,
    'as many as an engine reports'
  )
})
