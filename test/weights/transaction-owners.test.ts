import t from 'tap'
import { setImmediate as turn } from 'node:timers/promises'
import { memorySource } from '../helpers/memory-source.ts'
import type { RefitError } from '../../src/errors.ts'
import { held, setup } from './transaction-setup.ts'

t.test("other owners' calls get 409 with the owner and the seconds left", async t => {
  const { store, clock, names, write, holds } = await setup(t)
  const { id } = await store.transactions.open({ owner: 'trainer 7', deadlineMs: 30_000 })
  clock.advance(10_500)
  const calls: Array<() => Promise<any>> = [
    async () => await write(2, names),
    async () => await store.release(['kv_cache']),
    async () => await store.resume(),
    async () => await store.scramble(1n),
    async () => store.label('mine'),
    async () => await store.transactions.open({ owner: 'trainer 8' }),
    async () => await store.transactions.open({ owner: 'trainer 7', scope: true }),
    async () => await store.transactions.commit(null)
  ]
  for (const call of calls) {
    await t.rejects(call(), {
      code: 'TRANSACTION_OPEN',
      message: /the weight transaction of trainer 7 is open, for 20 s more at most/,
      statusCode: 409
    })
  }
  await t.rejects(write(2, names, { transaction: 'another' }), { code: 'NOT_FOUND', param: 'transaction' })
  t.throws(() => store.transactions.status('another'), { code: 'NOT_FOUND' })
  await holds(t, () => 1)
  t.match(store.transactions.status(id), { state: 'open', written: 0, failedCount: 0 })
  await store.transactions.abort(id, 'done')
  await t.rejects(write(2, names, { transaction: id }), { code: 'TRANSACTION_ENDED', message: /was aborted: done/ })

  await store.transactions.open({ owner: 'begin', scope: true })
  for (const call of [calls[1]!, calls[2]!, calls[3]!, calls[5]!]) {
    await t.rejects(call(), { code: 'TRANSACTION_OPEN', message: /\/end_weight_update ends it/ })
  }
  t.equal(store.label('later'), false)
  t.equal(store.weightVersion, 'default')
  await store.transactions.commit(null)
  t.equal(store.weightVersion, 'later')
})

t.test('a transaction ends at its deadline even if it is busy; a scope ends only after idle time', async t => {
  const { store, clock, names, write, torn, holds, shut } = await setup(t)
  const { id } = await store.transactions.open({ owner: 'trainer', deadlineMs: 10_000 })
  for (const name of names.slice(0, 3)) {
    clock.advance(3000)
    await write(2, [name], { transaction: id })
  }
  t.equal(store.transactions.current!.secondsLeft, 1)
  clock.advance(1000)
  await turn()
  t.match(store.transactions.status(id), {
    state: 'aborted',
    outcome: 'torn',
    reason: 'its deadline of 10 s has passed',
    torn: names.slice(0, 3).sort()
  })
  t.equal(shut(), 0)
  await t.rejects(store.transactions.commit(id), {
    code: 'TRANSACTION_ENDED',
    message: /its deadline of 10 s has passed/
  })
  await write(1, names)

  await store.transactions.open({ owner: 'begin', scope: true, deadlineMs: 10_000 })
  for (const name of names.slice(0, 5)) {
    clock.advance(9000)
    await write(2, [name])
  }
  t.equal(store.transactions.current!.secondsLeft, 10)
  clock.advance(10_000)
  await turn()
  t.equal(store.transactions.current, null)
  t.same(torn(), names.slice(0, 5).sort())
  await t.rejects(
    store.transactions.commit(null),
    { code: 'TRANSACTION_ENDED', message: /nothing came for 10 s/ },
    'the end does not report success'
  )
  await write(1, names)
  await holds(t, () => 1)
  t.equal(clock.armed, 0)
})

t.test('a write under way at the deadline is finished, and a scope counts as busy meanwhile', async t => {
  const { store, table, clock, first, send, torn } = await setup(t)
  for (const scope of [false, true]) {
    const { id } = await store.transactions.open({ owner: 'trainer', scope, deadlineMs: 5000 })
    const one = held(memorySource(table, first, 2))
    const writing = send(one.source, scope ? {} : { transaction: id }).then(
      () => 'done',
      (error: RefitError) => error.code
    )
    await one.inside
    clock.advance(60_000)
    await turn()
    t.equal(store.transactions.status(id).state, 'open')
    one.go()
    t.equal(await writing, scope ? 'done' : 'TRANSACTION_ENDED')
    clock.advance(5000)
    await turn()
    t.match(store.transactions.status(id), { state: 'aborted', outcome: 'torn' })
    t.same(torn(), [...first].sort())
  }
})

t.test("an owner may begin again after a crash: the first one's tensors are torn until written again", async t => {
  const { store, gates, names, first, write, torn, holds, shut } = await setup(t)
  for (const scope of [false, true]) {
    const counts = [gates.shutCount, gates.openCount]
    const old = await store.transactions.open({ owner: 'trainer', scope, version: 'old' })
    await write(2, first, scope ? {} : { transaction: old.id })
    const { id } = await store.transactions.open({ owner: 'trainer', scope, version: 'new' })
    t.not(id, old.id)
    t.match(store.transactions.status(old.id), {
      state: 'aborted',
      outcome: 'torn',
      reason: 'its owner began another one',
      tornCount: first.length
    })
    t.same(torn(), [...first].sort())
    t.same([gates.shutCount, gates.openCount], [counts[0]! + 1, counts[1]!], 'shut once, never opened between the two')
    t.match(store.transactions.current, { id, written: 0, writing: true })
    await t.rejects(write(2, first, { transaction: old.id }), {
      code: 'TRANSACTION_ENDED',
      message: /began another one/
    })
    await write(3, names, scope ? {} : { transaction: id })
    t.match(await store.transactions.commit(id), { outcome: 'new', tornCount: 0 })
    t.equal(store.weightVersion, 'new')
    t.equal(shut(), 0)
    await holds(t, () => 3)
    await write(1, names)
  }
  // Nothing was written, so nothing is torn.
  await store.transactions.open({ owner: 'begin', scope: true })
  await store.transactions.open({ owner: 'begin', scope: true })
  t.match(await store.transactions.commit(null), { state: 'committed', outcome: 'old' })
  t.same(store.state, { state: 'current' })
})

t.test('two begins and a deadline at once leave one scope open and no call pending', async t => {
  const { store, table, clock, first, names, send, write, holds, shut } = await setup(t)
  await store.transactions.open({ owner: 'begin', scope: true, deadlineMs: 5000 })
  const one = held(memorySource(table, first, 2))
  const writing = send(one.source).catch((error: RefitError) => error.code)
  await one.inside
  const begins = [1, 2, 3].map(async () =>
    await store.transactions.open({ owner: 'begin', scope: true, deadlineMs: 5000 })
  )
  const other = store.transactions.open({ owner: 'somebody' }).then(() => 'opened', (error: RefitError) => error.code)
  clock.advance(20_000)
  await turn()
  one.go()
  t.equal(await writing, 'TRANSACTION_ENDED')
  const opened = await Promise.all(begins)
  t.equal(await other, 'TRANSACTION_OPEN')
  t.equal(opened.filter(({ id }) => store.transactions.status(id).state === 'open').length, 1)
  await write(3, names)
  await store.transactions.commit(null)
  t.equal(shut(), 0)
  await holds(t, () => 3)
})

t.test('a transaction waits for earlier updates; later ones join a scope or are refused', async t => {
  const { store, table, names, send, write, holds } = await setup(t)
  for (const scope of [true, false]) {
    const one = held(memorySource(table, names, 2))
    const running = send(one.source, { version: 'before' })
    await one.inside
    let isOpen = false
    const opening = store.transactions.open({ owner: 'trainer', scope, version: 'after' }).then(status => {
      isOpen = true
      return status
    })
    const behind = write(3, names.slice(0, 1)).then(({ transaction }) => transaction, (error: RefitError) => error.code)
    const release = store.release(['kv_cache']).catch((error: RefitError) => error.code)
    await turn()
    t.notOk(isOpen)
    one.go()
    await running
    const { id } = await opening
    t.equal(await behind, scope ? id : 'TRANSACTION_OPEN')
    t.equal(await release, 'TRANSACTION_OPEN')
    t.equal(store.weightVersion, 'before')
    await store.transactions.commit(id)
    t.equal(store.weightVersion, 'after')
    await holds(t, name => scope && name === names[0] ? 3 : 2)
    await write(1, names)
  }
})
