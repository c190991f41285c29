import t from 'tap'
import { differenceOfBytes } from '../../src/gateway/compare-checksums.ts'
import { readHeaders, replyHeaders, requestHeaders } from '../../src/gateway/headers.ts'
import { mergeReplies, replyOf } from '../../src/gateway/replies.ts'
import type { Outcome } from '../../src/gateway/replies.ts'
import { Worker } from '../../src/gateway/worker.ts'
import { says, scriptedEngine } from '../helpers/scripted-engine.ts'

const workers = [1, 2, 3].map(port => new Worker(`http://127.0.0.1:${port}`, {}))
t.teardown(async () => {
  await Promise.all(workers.map(async ({ connection }) => {
    await connection.close()
  }))
})

function outcomes (...replies: Array<[status: number, body: unknown] | Error>): Outcome[] {
  return replies.map((reply, i) =>
    reply instanceof Error
      ? { worker: workers[i]!, error: reply }
      : replyOf(workers[i]!, reply[0], { 'content-type': 'application/json' }, Buffer.from(JSON.stringify(reply[1])))
  )
}

const merged = (...args: Parameters<typeof mergeReplies>): { status: number, body: any } => {
  const { status, body } = mergeReplies(...args)
  return { status, body: JSON.parse(String(body)) }
}

t.test('engines that disagree about a field are named with their values', async t => {
  const rule = { agree: 'weight_version' }
  t.throws(() => mergeReplies(rule, outcomes([200, { weight_version: 'a' }], [200, { weight_version: 'b' }])), {
    code: 'VERSIONS_DISAGREE',
    message: 'engines hold different weights (weight_version): http://127.0.0.1:1: "a"; http://127.0.0.1:2: "b"'
  })
  t.throws(() => mergeReplies(rule, outcomes([200, { weight_version: 'a' }], [200, {}])), { code: 'VERSIONS_DISAGREE' })
  const same = outcomes([200, { weight_version: 'a', n: 1 }], [200, { weight_version: 'a', n: 2 }])
  t.match(merged(rule, same), { status: 200, body: { weight_version: 'a', n: 1 } })
})

t.test('one failure among several engines fails the call, and names the engine', async t => {
  const good: [number, object] = [200, { success: true }]
  for (
    const [failure, message] of [
      [[409, { message: 'busy' }], /127.0.0.1:2: 409 busy$/],
      [[200, { success: false, message: 'torn' }], /127.0.0.1:2: torn$/],
      [new Error('gone'), /127.0.0.1:2: gone$/]
    ] as const
  ) {
    const { status, body } = merged({}, outcomes(good, failure as [number, object], good))
    t.equal(status, 502)
    t.match(body, { success: false, message, error: { code: 'ENGINE_FAILED' } })
    t.match(body.message, /^1 of 3 engines failed: /)
    t.match(body.engines, { 'http://127.0.0.1:1': { status: 200, success: true } })
  }
  const all = merged({}, outcomes([409, { error: { code: 'CONFLICT' } }], [409, { error: { code: 'CONFLICT' } }]))
  t.match(all, { status: 409, body: { error: { code: 'CONFLICT' } } }, 'a failure of all keeps its status')
  t.equal(merged({}, outcomes([409, {}], [400, {}])).status, 502)
})

t.test('lists are joined, numbers added and flags combined', async t => {
  const bodies = outcomes([200, { l: [1], n: 1, f: true, x: 'a' }], [200, { l: [2, 3], n: 4, f: false, x: 'b' }])
  t.match(merged({ join: ['l'], sum: ['n'], every: ['f'] }, bodies), {
    status: 200,
    body: { l: [1, 2, 3], n: 5, f: false, x: 'a' }
  })
  t.same(merged({}, outcomes([200, [1]], [200, [2]])).body, [1, 2])
})

t.test('checksums are compared by name, whatever their order', async t => {
  const checks = (checksums: object) => ({ '/weights_checker': says({ success: true, checksums }) })
  const engines = await Promise.all([
    scriptedEngine(t, { on: checks({ a: '1', b: '2', c: '3' }) }),
    scriptedEngine(t, { on: checks({ c: '3', a: '1', b: '2' }) }),
    scriptedEngine(t, { on: checks({ a: '1', b: '9', c: '3' }) }),
    scriptedEngine(t, { on: checks({ a: '1', b: '2' }) }),
    scriptedEngine(t, { on: { '/weights_checker': says({ message: 'busy' }, 409) } })
  ])
  const [one, other, different, short, refusing] = engines.map(({ url }) => new Worker(url, {}))
  t.teardown(async () => {
    for (const worker of [one, other, different, short, refusing]) await worker!.connection.close()
  })
  t.equal(await differenceOfBytes(one!, other!), null)
  t.match(await differenceOfBytes(different!, one!), /^it holds other weights than http:\S+: b$/)
  t.match(await differenceOfBytes(short!, one!), /: c$/)
  t.match(await differenceOfBytes(one!, short!), /^it holds other weights than/)
  t.match(await differenceOfBytes(refusing!, one!), /^its checksums could not be read: .*busy/)
  t.match(await differenceOfBytes(one!, refusing!), /^checksums of http:\S+ could not be read: /)
})

t.test('headers of one connection are not passed on, those of the message are', async t => {
  const ofMessage = { authorization: 'Bearer k', 'content-type': 'application/json', 'x-session-id': '7' }
  const ofConnection = {
    connection: 'keep-alive, X-Own',
    'keep-alive': '5',
    'proxy-authorization': 'Basic secret',
    'proxy-authenticate': 'Basic',
    'proxy-connection': 'keep-alive',
    te: 'trailers',
    trailer: 'x',
    'transfer-encoding': 'chunked',
    upgrade: 'h2c',
    'x-own': 'named by connection'
  }
  const all = { ...ofMessage, ...ofConnection }
  t.same(requestHeaders({ ...all, host: 'gateway', expect: '100-continue' }), ofMessage)
  t.same(readHeaders({ ...all, host: 'gateway', 'accept-encoding': 'br' }), ofMessage)
  t.same(replyHeaders({ ...all, host: 'engine' }), { ...ofMessage, host: 'engine' })
})
