import t from 'tap'
import { setImmediate as turn } from 'node:timers/promises'
import { memorySource } from '../helpers/memory-source.ts'
import type { RefitError } from '../../src/errors.ts'
import { breaking, held, PIECES, setup, streamed } from './transaction-setup.ts'

t.test('a commit or an abort may be repeated, but not followed by the other', async t => {
  const { store, names, write } = await setup(t)
  t.equal(await store.transactions.commit(null), null, 'an end without a begin')
  const one = await store.transactions.open({ owner: 'trainer' })
  await write(2, names, { transaction: one.id })
  const both = await Promise.all([
    store.transactions.commit(one.id, { version: 'v2' }),
    store.transactions.commit(one.id, { version: 'v2' })
  ])
  t.same(both[0], both[1])
  t.same(await store.transactions.commit(one.id), both[0])
  await t.rejects(store.transactions.abort(one.id, 'too late'), { code: 'TRANSACTION_ENDED', message: /was committed/ })
  const two = await store.transactions.open({ owner: 'trainer' })
  const aborted = await Promise.all([store.transactions.abort(two.id, 'a'), store.transactions.abort(two.id, 'b')])
  t.same(aborted[0], aborted[1])
  await t.rejects(store.transactions.commit(two.id), { code: 'TRANSACTION_ENDED' })
  t.equal(store.weightVersion, 'v2')
})

t.test('the status of the last 64 transactions can be read, and older ones are forgotten', async t => {
  const { store } = await setup(t)
  for (let i = 0; i < 66; i++) {
    await store.transactions.open({ owner: 'trainer', id: `t${i}` })
    await store.transactions.abort(`t${i}`, 'the next one')
  }
  for (const id of ['t0', 't1', 'another']) t.throws(() => store.transactions.status(id), { code: 'NOT_FOUND' })
  for (const id of ['t2', 't65']) t.match(store.transactions.status(id), { id, state: 'aborted' })
  await t.rejects(store.transactions.open({ owner: 'trainer', id: 't65' }), { code: 'CONFLICT' })
})

t.test('a transaction on released weights is refused, and another one opens after the resume', async t => {
  const { store, names, write } = await setup(t)
  await store.release(['weights'])
  await t.rejects(store.transactions.open({ owner: 'trainer' }), {
    code: 'CONFLICT',
    message: /resume_memory_occupation/
  })
  await store.resume(['weights'])
  const { id } = await store.transactions.open({ owner: 'trainer', expected: 'all' })
  await write(2, names, { transaction: id })
  t.match(await store.transactions.commit(id), { tornCount: 0 })
})

t.test('a label without a write is set at the end of the scope, when the gate opens', async t => {
  const { store, gates } = await setup(t)
  const { id } = await store.transactions.open({ owner: 'trainer', version: 'a' })
  const shut = gates.shutCount
  t.match(await store.transactions.commit(id, { version: 'b', flushCache: false }), { outcome: 'old', version: 'b' })
  t.equal(gates.shutCount, shut + 1)
  t.match(gates.last, { version: 'b', flushCache: false, torn: null })
})

t.test('after an abort the tensors of a broken write stay torn, and so does the rest of the scope', async t => {
  const { store, table, first, second, send, write, torn } = await setup(t)
  const { id } = await store.transactions.open({ owner: 'begin', scope: true })
  await write(2, first)
  await t.rejects(send(breaking(memorySource(table, second.slice(0, 2), 2))), { code: 'WEIGHTS_TORN' })
  t.match(store.transactions.current, { failed: second.slice(0, 2), torn: second.slice(0, 2).sort() })
  t.match(await store.transactions.abort(id, 'gone'), { outcome: 'torn' })
  t.same(torn(), [...first, ...second.slice(0, 2)].sort())
})

t.test('streams with different tensors are written at once; one with the same tensors and a commit wait', async t => {
  const { store, table, gates, names, send, holds } = await setup(t)
  const shut = gates.shutCount
  const { id } = await store.transactions.open({ owner: 'trainer', expected: 'all', version: 'v2' })
  const third = Math.ceil(names.length / 3)
  const parts = [0, 1, 2].map(part =>
    streamed(memorySource(table, names.slice(part * third, (part + 1) * third), 2), PIECES)
  )
  const again = streamed(memorySource(table, names.slice(0, 2), 3), 2)
  const writes = [...parts, again].map(async ({ source }) => await send(source, { transaction: id }))
  await turn()
  while (parts.some(({ given }) => given() === 0)) {
    t.equal(again.given(), 0)
    await turn()
  }
  t.ok(parts.every(({ given }) => given() < PIECES), 'none had to wait for another')
  const commit = store.transactions.commit(id)
  await Promise.all(writes)
  t.match(await commit, { state: 'committed', written: names.length, writes: 4 })
  t.equal(gates.shutCount, shut + 1)
  await holds(t, name => names.indexOf(name) < 2 ? 3 : 2)
})

t.test('an abort and a deadline do not wait for bytes that never arrive, and list the torn tensors', async t => {
  const { store, table, clock, first, second, names, send, write, torn, shut } = await setup(t)
  for (const scope of [false, true]) {
    const { id } = await store.transactions.open({ owner: 'trainer', scope, deadlineMs: 5000 })
    const one = streamed(memorySource(table, first, 2), 4, 2)
    const other = streamed(memorySource(table, second, 2), 4, 0)
    const writes = [one, other].map(async ({ source }) =>
      await send(source, scope ? {} : { transaction: id }).then(() => 'done', (error: RefitError) => error.code)
    )
    await one.begun
    await turn()
    if (scope) await store.transactions.abort(id, 'enough')
    else clock.advance(5000)
    t.same(await Promise.all(writes), ['WEIGHTS_TORN', 'TRANSACTION_ENDED'])
    while (store.transactions.current !== null) await turn()
    t.match(store.transactions.status(id), { state: 'aborted', outcome: 'torn' })
    t.same(torn(), [...first].sort())
    t.equal(shut(), 0)
    await write(1, names)
  }
})

t.test('coverage is counted from the first pause, also if another pause or a transaction follows', async t => {
  const { store, names, write } = await setup(t)
  store.paused(true)
  t.equal(store.lastCoverage, null, 'no update yet')
  await write(2, names.slice(0, 3))
  store.paused(true)
  await store.transactions.open({ owner: 'begin', scope: true })
  await write(2, names.slice(5))
  await store.transactions.commit(null)
  store.paused(false)
  t.same(store.lastCoverage, { since: 'pause', missing: names.slice(3, 5), missingCount: 2 })
  await store.transactions.open({ owner: 'begin', scope: true })
  await write(2, names.slice(1))
  t.same(store.lastCoverage, { since: 'transaction', missing: [names[0]!], missingCount: 1 })
  await store.transactions.commit(null)
  store.paused(true)
  t.equal(store.lastCoverage, null)
})

t.test('a commit that waits behind a write sets the label of that write', async t => {
  const { store, table, names, first, second, gates, send, holds } = await setup(t)
  const { id } = await store.transactions.open({ owner: 'trainer', version: 'old' })
  await send(memorySource(table, first, 2), { transaction: id })
  const last = held(memorySource(table, second, 2))
  const writing = send(last.source, { transaction: id, version: 'named last' })
  await last.inside
  const commit = store.transactions.commit(id)
  await turn()
  last.go()
  await writing
  t.match(await commit, { state: 'committed', version: 'named last', written: names.length })
  t.equal(store.weightVersion, 'named last')
  t.match(gates.last, { version: 'named last' })
  await holds(t, () => 2)
})

t.test('a label that arrives while a commit opens the gate is refused, not lost', async t => {
  const { store, first, write } = await setup(t)
  const { id } = await store.transactions.open({ owner: 'trainer', version: 'v2' })
  await write(2, first, { transaction: id })
  const late = await store.update({ transaction: id })
  let refused: unknown
  t.equal(store.transactions.current?.writing, true)
  store.ledger.label = version => {
    Object.getPrototypeOf(store.ledger).label.call(store.ledger, version)
    refused = late.commit({ version: 'v3' }).then(() => null, (error: unknown) => error)
  }
  t.match(await store.transactions.commit(id), { state: 'committed', version: 'v2' })
  t.match(await refused, { code: 'TRANSACTION_ENDED', message: /was committed/ })
  t.equal(store.weightVersion, 'v2')
})

t.test('many streams at once cause no warning', async t => {
  const { store, table, names, send } = await setup(t)
  const warnings: Error[] = []
  const onWarning = (warning: Error): void => {
    warnings.push(warning)
  }
  process.on('warning', onWarning)
  t.teardown(() => {
    process.off('warning', onWarning)
  })
  const { id } = await store.transactions.open({ owner: 'trainer' })
  await Promise.all(
    names.slice(0, 14).map(async name =>
      await send(streamed(memorySource(table, [name], 2), 2).source, { transaction: id })
    )
  )
  await store.transactions.commit(id)
  await turn()
  t.same(warnings, [])
})
