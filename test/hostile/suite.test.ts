import { createServer } from 'node:http'
import type { AddressInfo } from 'node:net'
import t from 'tap'
import { until } from '../helpers/route-app.ts'
import { pollHealth } from './lib/health.ts'
import { Random } from './lib/random.ts'
import { Report } from './lib/report.ts'

t.test('a seed gives the same attacks again, another seed gives others', async t => {
  const attacks = (seed: number): unknown => {
    const random = new Random(seed)
    return [
      random.bytes(8),
      random.damaged(Buffer.alloc(20), 3),
      random.some(['a', 'b', 'c', 'd'], 2),
      random.below(1000)
    ]
  }
  t.same(attacks(7), attacks(7))
  t.notSame(attacks(7), attacks(8))
})

t.test('the poll of /health sees a server that stands still, and replies other than 200', async t => {
  let requests = 0
  const server = createServer((_request, reply) => {
    // Its third reply comes after the process has computed for 600 ms, however busy the machine is.
    const end = cpuMs() + (++requests === 3 ? 600 : 0)
    while (cpuMs() < end);
    reply.writeHead(requests === 5 ? 503 : 200).end('{}')
  })
  t.teardown(() => server.close())
  await new Promise<void>(resolve => server.listen(0, '127.0.0.1', resolve))
  const url = `http://127.0.0.1:${(server.address() as AddressInfo).port}`
  const end = await pollHealth([{ pid: process.pid, url }])
  await until(() => requests >= 10)
  server.closeAllConnections()
  const times = await end()
  t.same(times.map(({ name }) => name).sort(), ['control', url])
  const seen = times.find(({ name }) => name === url)!
  // Other threads of the process (the compiler, the collector of garbage) take part of its 600 ms.
  t.ok(seen.worst >= 200, `${seen.worst} of ${seen.longest} ms`)
  t.ok(seen.longest >= seen.worst)
  t.ok(seen.bad >= 1)
})

function cpuMs (): number {
  const { user, system } = process.cpuUsage()
  return (user + system) / 1000
}

t.test('a check that fails is counted, shown and can be repeated', async t => {
  const report = new Report()
  report.now = { family: 'jail', seed: 12 }
  report.check('paths', true, () => '')
  report.check('paths', false, () => 'the path')
  t.same([report.checks, report.failed], [2, 1])
  t.match(report.table(), /jail +2 +1 {2}paths[^]*the path[^]*--only jail --seed 12/)
})
