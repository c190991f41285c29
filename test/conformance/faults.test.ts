import t from 'tap'
import type { Test } from 'tap'
import { HttpTarget } from '../../src/conformance/http-target.ts'
import { checkServer } from '../../src/conformance/check-server.ts'
import { PROMISES } from '../../src/conformance/promises/index.ts'
import { nameRow, runPromises } from '../../src/conformance/run-promises.ts'
import { SglangServer } from '../../src/conformance/servers/sglang.ts'
import { setUp } from '../../src/conformance/setup.ts'
import { serveModel } from '../helpers/conformance/served-model.ts'
import { faultyProxy } from '../helpers/conformance/faulty-proxy.ts'
import { swallow } from '../helpers/conformance/fault-forms.ts'
import { FAULTS } from '../helpers/conformance/faults.ts'

// A proxy in front of refit breaks promises one by one. Each fault must be found by the promise that it breaks.

t.test('each fault is found by its promises, and every promise finds a fault', { timeout: 1_200_000 }, async t => {
  const { url, options } = await serveModel(t, { isSmall: true, groupTimeoutMs: 60_000 })
  const proxy = await faultyProxy(t, url)
  const target = new HttpTarget(proxy.url, { patienceMs: options.patienceMs })
  const context = await setUp({ ...options, server: new SglangServer(target) })
  t.teardown(async () => {
    await context.close()
    await target.close()
  })
  const found = new Set<string>()
  for (const { name, make, rows: wanted, patienceMs = options.patienceMs } of FAULTS) {
    await t.test(`a server that ${name}`, async t => {
      for (const [only, observed] of Object.entries(wanted)) {
        proxy.fault = null
        target.patienceMs = options.patienceMs
        await context.restore()
        proxy.fault = make({ b: context.variants.B.folder, c: context.variants.C.folder })
        target.patienceMs = patienceMs
        const [row] = await runPromises(context, PROMISES, { only })
        if (row === undefined) return t.fail(`there is no promise ${only}`)
        t.equal(row.verdict, 'broken', `${only}: ${row.detail}`)
        t.match(row.detail, observed, only)
        found.add(nameRow(row, ''))
      }
    })
  }
  proxy.fault = null
  target.patienceMs = options.patienceMs
  await context.restore()
  t.same(PROMISES.map(promise => nameRow(promise, '')).filter(name => !found.has(name)), [], 'promises without a fault')
})

async function checkWith (t: Test, path: string): Promise<Awaited<ReturnType<typeof checkServer>>> {
  const { url, options } = await serveModel(t, { isSmall: true })
  const proxy = await faultyProxy(t, url)
  proxy.fault = swallow(request => request.includes(path))
  return await checkServer(proxy.url, { ...options, transports: ['disk', 'tensor', 'bucket', 'upload'], only: 'round' })
}

t.test('a server that answers 200 to every update and writes none breaks the setup', async t => {
  const rows = await checkWith(t, '/update_weights')
  t.match(rows, [{ group: 'setup', verdict: 'broken', detail: /no update changes what the server answers/ }])
})

t.test('if one transport writes nothing, another one shows it', async t => {
  const rows = await checkWith(t, '/update_weights_from_disk')
  t.match(rows.map(({ way, verdict }) => [way, verdict]), [
    ['disk', 'broken'],
    ['tensor', 'kept'],
    ['bucket', 'kept'],
    ['upload', 'kept'],
    ['distributed', 'not offered']
  ])
})
