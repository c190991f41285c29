import { join } from 'node:path'
import t from 'tap'
import { packageRoot } from '../../../src/root.ts'
import { native } from '../../../src/native/load-addon.ts'
import { call, routeApp } from '../../helpers/route-app.ts'
import { BUCKETS, serve, until } from '../../helpers/transaction-server.ts'

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')

const PHASES = ['announce', 'wait', 'plan', 'gate', 'scatter', 'verify', 'commit', 'close']

t.test('an update is listed with its phases, bytes, rate, sender, labels and stall', async t => {
  const server = await serve(t)
  t.same((await server.get('/updates')).body, { updates: [] })
  await server.ok('/update_weights_from_disk', { model_path: join(server.folder, 'trained'), weight_version: 'step-1' })
  const { updates: [update, ...others] } = (await server.get('/updates')).body
  t.same(others, [])
  t.match(update, {
    kind: 'weights',
    dialect: 'sglang',
    route: '/update_weights_from_disk',
    address: '127.0.0.1',
    transport: 'disk',
    transaction: null,
    adapter: null,
    requests: 1,
    paused: null,
    label_before: 'default',
    label_after: 'step-1',
    outcome: 'done',
    error: null
  })
  t.same(Object.keys(update.ms), [...PHASES, 'total'])
  const sum = PHASES.reduce((total, phase) => total + update.ms[phase], 0)
  t.ok(sum <= update.ms.total + 0.1, `${sum} of ${update.ms.total} ms`)
  t.ok(update.stall_ms >= update.ms.scatter, 'the gate is shut while bytes are written')
  t.ok(update.stall_ms <= update.ms.total)
  t.ok(update.bytes > 0 && update.tensors > 0 && update.gb_per_second > 0)
  t.same(update.spans.map(([phase]: [string]) => phase), PHASES)
  for (const [i, [, at, ms]] of update.spans.entries()) {
    const next = update.spans[i + 1]?.[1] ?? update.ms.total
    t.ok(at + ms <= next + 0.1, `${PHASES[i]} ends before the next phase`)
  }
})

t.test('a refusal has its code, and no bytes; the label stays', async t => {
  const server = await serve(t)
  const refused = await server.post('/update_weights_from_disk', { model_path: '/nowhere', weight_version: 'step-2' })
  t.equal(refused.status, 400)
  const { updates } = (await server.get('/updates')).body
  t.match(updates, [{
    outcome: 'refused',
    error: { code: 'CHECKPOINT_PATH', message: /nowhere/ },
    transport: null,
    bytes: 0,
    gb_per_second: null,
    stall_ms: null,
    label_before: 'default',
    label_after: 'default'
  }])
  t.ok(updates[0].ms.failed > 0)
})

t.test('all requests of a scope are one update, which ends with the scope', async t => {
  const server = await serve(t)
  await server.ok('/begin_weight_update', { weight_version: 'step-3' })
  for (let i = 0; i < BUCKETS; i++) await server.bucket('trained', i)
  const open = (await server.get('/updates')).body.updates
  t.match(open, [{ requests: BUCKETS, outcome: 'running', label_after: null }])
  await server.ok('/end_weight_update')
  const { updates: [update, ...others] } = (await server.get('/updates')).body
  t.same(others, [])
  t.match(update, { id: open[0].id, requests: BUCKETS, outcome: 'done', label_after: 'step-3', error: null })
  t.ok(update.stall_ms > open[0].ms.scatter, 'the gate was shut from the first bucket to the end')
  t.same([...new Set(update.spans.map(([, , , request]: number[]) => request))], [0, 1, 2])
})

t.test('the commit of a transaction reports how long its copies and its swap took, as an update does', async t => {
  const server = await serve(t, { shadowWeights: true })
  const { id } = await server.ok('/weight_transactions', { owner: 'test' })
  t.equal((await server.get('/weight_transactions')).body.open.ms, null)
  for (const index of [0, 1]) t.equal((await server.bucket('trained', index, { transaction: id })).status, 200)
  const committed = await server.ok(`/weight_transactions/${id}/commit`, {})
  t.ok(committed.ms.copy > 0 && committed.ms.swap > 0)
  t.same(Object.keys(committed.ms), ['copy', 'swap'])
  t.same((await server.get(`/weight_transactions/${id}`)).body.ms, committed.ms)
  const { updates: [update] } = (await server.get('/updates')).body
  t.match(update, { transaction: id, requests: 2, outcome: 'done' })
  for (const phase of ['copy', 'swap']) t.ok(Math.abs(update.ms[phase] - committed.ms[phase]) < 0.01, phase)
  t.same(update.spans.slice(-2).map(([phase, , , request]: unknown[]) => [phase, request]), [['copy', 2], ['swap', 2]])
  const { traceEvents } = (await server.get(`/updates/${update.id}/trace.json`)).body
  const events = ['update', 'copy', 'swap'].map(name =>
    traceEvents.find((event: { ph: string, name: string }) => event.ph === 'X' && event.name.startsWith(name))
  )
  t.ok(events[1].ts + events[1].dur <= events[2].ts + 1, 'the swap follows the copies')
  t.ok(events[2].ts + events[2].dur <= events[0].ts + events[0].dur + 1, 'the update ends with the swap')

  await server.ok('/begin_weight_update', {})
  t.equal((await server.bucket('base', 0)).status, 200)
  const scope = (await server.ok('/end_weight_update', {})).transaction
  t.ok(scope.ms.copy > 0 && scope.ms.swap > 0)
  const inPlace = await server.ok('/weight_transactions', { owner: 'test', swap: 'in_place' })
  t.equal((await server.bucket('trained', 0, { transaction: inPlace.id })).status, 200)
  t.equal((await server.ok(`/weight_transactions/${inPlace.id}/commit`, {})).ms, null)
})

t.test('an aborted transaction is torn, with its reason; a stranger meanwhile has an entry of its own', async t => {
  const server = await serve(t)
  const { id } = await server.ok('/weight_transactions', { owner: 'test', expected: 'all' })
  await server.bucket('trained', 0, { transaction: id })
  t.equal((await server.bucket('trained', 1)).status, 409)
  await server.ok(`/weight_transactions/${id}/abort`, { reason: 'enough' })
  const { updates } = (await server.get('/updates')).body
  t.match(updates, [
    { outcome: 'refused', requests: 1, error: { code: 'TRANSACTION_OPEN' }, transaction: null },
    { outcome: 'torn', requests: 1, error: { message: /enough/ }, transaction: id, label_after: 'default' }
  ])
})

t.test('a torn update is torn, and the next one is done', async t => {
  const server = await serve(t)
  const model = { model_path: join(server.folder, 'trained') }
  for (let round = 0; round < 2; round++) {
    native().armFault!({ point: 'read', at: 2, action: 'fail' })
    t.not((await server.post('/update_weights_from_disk', model)).status, 200)
    native().armFault!(null)
    await server.ok('/update_weights_from_disk', model)
  }
  const { updates } = (await server.get('/updates')).body
  const torn = { outcome: 'torn', error: { code: 'WEIGHTS_TORN', message: /injected fault/ } }
  const done = { outcome: 'done', error: null }
  t.match(updates, [done, torn, done, torn])
  t.ok(updates[1].ms.failed > 0 && updates[1].stall_ms > 0, 'the gate was shut for the write that failed')
})

t.test('two updates in a row tell which requests they stalled, and their times add up', async t => {
  const server = await serve(t)
  await server.ok('/pause_generation', { mode: 'in_place' })
  const generate = async (): Promise<unknown> =>
    await server.ok('/generate', { text: '1+2=', sampling_params: { max_new_tokens: 1, ignore_eos: true } })
  const waiting: Promise<unknown>[] = []
  for (const count of [2, 1]) {
    for (let i = 0; i < count; i++) waiting.push(generate())
    await until(() => server.engine.stats.queued === waiting.length)
    await server.ok('/update_weights_from_disk', { model_path: join(server.folder, 'trained'), flush_cache: false })
  }
  await server.ok('/continue_generation')
  await Promise.all(waiting)
  await server.ok('/update_weights_from_disk', { model_path: join(server.folder, 'trained') })
  const { updates } = (await server.get('/updates')).body
  t.match(updates, [
    { stalled_requests: 0, paused: null },
    { stalled_requests: 3, paused: 'in_place' },
    { stalled_requests: 2, paused: 'in_place' }
  ])
  t.ok(updates[0].started_at > updates[1].started_at && updates[1].started_at > updates[2].started_at, 'newest first')
  for (const { ms: { total, ...phases }, stall_ms: stall, bytes, gb_per_second: rate, spans } of updates) {
    const sum = Object.values(phases as Record<string, number>).reduce((sum, ms) => sum + ms, 0)
    t.ok(sum <= total + 0.1 && stall <= total && stall >= phases.scatter, `${sum} and ${stall} of ${total} ms`)
    t.ok(Math.abs(bytes / 1e6 / phases.scatter - rate) < 0.01 * rate + 0.01, `${rate} GB/s`)
    const ends = spans.map(([, at, ms]: number[]) => at! + ms!)
    t.ok(Math.max(...ends) <= total + 0.1)
  }
})

t.test('the log keeps the last 100, whatever their outcomes, and traces of those alone', async t => {
  const server = await serve(t)
  const ids: string[] = []
  for (let i = 0; i < 104; i++) {
    if (i % 3 === 0) await server.ok('/update_weights_from_disk', { model_path: join(server.folder, 'trained') })
    else await server.post('/update_weights_from_disk', { model_path: `/nowhere-${i}` })
    ids.unshift((await server.get('/updates')).body.updates[0].id)
  }
  const { updates } = (await server.get('/updates')).body
  t.same(updates.map(({ id }: { id: string }) => id), ids.slice(0, 100))
  const outcomes = updates.slice(0, 4).map(({ outcome }: { outcome: string }) => outcome)
  t.same(outcomes, ['refused', 'done', 'refused', 'refused'])
  for (const [index, status] of [[0, 200], [99, 200], [100, 404], [103, 404]] as const) {
    t.equal((await server.get(`/updates/${ids[index]}/trace.json`)).status, status, `update ${index}`)
  }
})

t.test('the oldest entries leave a full log', async t => {
  const { url } = await routeApp(t)
  for (let i = 0; i < 103; i++) await call(`${url}/update_weights_from_disk`, { model_path: `/nowhere-${i}` })
  const { json: { updates } } = await call(`${url}/updates`)
  t.equal(updates.length, 100)
  t.match(updates[0].error.message, /nowhere-102/)
  t.match(updates[99].error.message, /nowhere-3/)
})

t.test("a trace is in Chrome's format, with a row for the gate and one for each request", async t => {
  const server = await serve(t)
  await server.ok('/begin_weight_update', {})
  for (let i = 0; i < BUCKETS; i++) await server.bucket('trained', i)
  await server.ok('/end_weight_update')
  const { updates: [{ id }] } = (await server.get('/updates')).body
  const { status, body } = await server.get(`/updates/${id}/trace.json`)
  t.equal(status, 200)
  const events: any[] = body.traceEvents
  t.same(Object.keys(body).sort(), ['displayTimeUnit', 'otherData', 'traceEvents'])
  const isTime = (value: unknown): boolean => Number.isSafeInteger(value) && Number(value) >= 0
  for (const { name, cat, ph, ts, dur, pid, tid, args } of events) {
    if (ph === 'M') t.ok(['process_name', 'thread_name'].includes(name) && typeof args.name === 'string', name)
    else t.ok(ph === 'X' && cat === 'update' && isTime(ts) && isTime(dur) && typeof args === 'object', name)
    t.ok(pid === 1 && (name === 'process_name' || Number.isInteger(tid)))
  }
  // A row holds a stack: the events of one row follow each other or lie inside of each other.
  const complete = events.filter(({ ph }) => ph === 'X')
  const crossing = complete.filter(a =>
    complete.some(b => a.tid === b.tid && a.ts < b.ts && b.ts < a.ts + a.dur && a.ts + a.dur < b.ts + b.dur)
  )
  t.same(crossing, [])
  const rows = Object.fromEntries(events.filter(({ name }) => name === 'thread_name').map(e => [e.args.name, e.tid]))
  t.same(Object.keys(rows), ['update', 'gate', 'request 1', 'request 2', 'request 3'])
  const of = (row: string): string[] => events.filter(e => e.ph === 'X' && e.tid === rows[row]).map(e => e.name)
  t.same(of('gate'), ['gate shut'])
  t.same(of('request 2').slice(0, 2), ['announce', 'wait'])
  t.match(await server.get('/updates/none/trace.json'), { status: 404, body: { error: { code: 'NOT_FOUND' } } })
})
