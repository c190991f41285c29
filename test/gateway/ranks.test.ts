import t from 'tap'
import { ask, engineServer, gatewayTo, modelFolder } from '../helpers/gateway.ts'

t.test('a data-parallel rank is the place of an engine behind the gateway', async t => {
  const folder = modelFolder(t)
  const engines = await Promise.all([0, 1].map(async () => await engineServer(t, folder)))
  const gateway = await gatewayTo(t, engines.map(({ url }) => url))
  const counts = (): number[] => engines.map(({ engine }) => engine.stats.promptTokens)
  const whoServes = async (fields: object, headers = {}): Promise<number> => {
    const before = counts()
    const { status, body } = await gateway.post('/generate', ask('12+34=', fields), headers)
    t.equal(status, 200, JSON.stringify(body))
    for (;;) {
      const who = counts().findIndex((count, i) => count > before[i]!)
      if (who >= 0) return who
      await new Promise(resolve => setTimeout(resolve, 2))
    }
  }
  for (const rank of [1, 0, 1]) {
    t.equal(await whoServes({ routed_dp_rank: rank }), rank)
    t.equal(await whoServes({ data_parallel_rank: rank }), rank)
    t.equal(await whoServes({}, { 'x-data-parallel-rank': String(rank) }), rank)
    t.equal(await whoServes({ routed_dp_rank: 1 - rank }, { 'X-Data-Parallel-Rank': String(rank) }), rank)
  }
  for (const rank of [2, -1, 0.5]) {
    const { status, body } = await gateway.post('/generate', ask('1+1=', { routed_dp_rank: rank }))
    t.equal(status, 400)
    t.match(body.message, /^routed_dp_rank: expected a data-parallel rank from 0 to 1, got /)
  }
  t.equal((await gateway.post('/generate', ask('1+1='), { 'x-data-parallel-rank': 'two' })).status, 400)
  const settling = gateway.app.gateway.fleet.list[1]!
  gateway.app.gateway.options.waitMs = 30_000
  gateway.app.gateway.fleet.unready(settling, 'stale', 'it is being compared')
  gateway.app.gateway.health.soon(settling)
  t.equal(await whoServes({ routed_dp_rank: 1 }), 1, 'a request waits for its rank while that may come back')
  gateway.app.gateway.options.waitMs = 0
  await engines[1]!.kill()
  await gateway.until(engines[1]!.url, 'down')
  t.equal((await gateway.post('/generate', ask('1+1=', { routed_dp_rank: 1 }))).status, 503, 'and no other engine')
  t.equal(await whoServes({ routed_dp_rank: 0 }), 0)
})

t.test('an engine has data-parallel rank 0 only', async t => {
  const { url } = await engineServer(t, modelFolder(t))
  const status = async (rank: string): Promise<number> => {
    const reply = await fetch(`${url}/generate`, {
      method: 'POST',
      headers: { 'content-type': 'application/json', 'x-data-parallel-rank': rank },
      body: JSON.stringify(ask('1+1='))
    })
    return reply.status
  }
  t.same([await status('0'), await status('1'), await status('x')], [200, 400, 400])
})
