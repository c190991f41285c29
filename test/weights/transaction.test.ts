import t from 'tap'
import { setImmediate as turn } from 'node:timers/promises'
import { memorySource } from '../helpers/memory-source.ts'
import type { RefitError } from '../../src/errors.ts'
import { addon, held, setup } from './transaction-setup.ts'

for (const architecture of ['LlamaForCausalLM', 'Qwen3MoeForCausalLM'] as const) {
  t.test(`${architecture}: the gate is shut once, from the first write to the commit`, async t => {
    const { store, gates, names, first, second, write, holds, shut } = await setup(t, architecture)
    const opened = gates.openCount
    const { id, ...status } = await store.transactions.open({ owner: 'trainer', expected: 'all', version: 'v2' })
    t.match(status, {
      owner: 'trainer',
      scope: false,
      state: 'open',
      writing: false,
      version: 'v2',
      expected: names.length,
      written: 0,
      missingCount: names.length,
      secondsLeft: 60,
      outcome: null
    })
    t.equal(shut(), 0, 'the gate is not shut before a write')
    const report = await write(2, first, { transaction: id })
    t.equal(report.transaction, id)
    t.equal(report.missingCount, second.length)
    t.match(store.transactions.status(id), {
      writing: true,
      written: first.length,
      missingCount: second.length,
      missing: second,
      writes: 1
    })
    t.equal(shut(), 1)
    await write(2, second, { transaction: id })
    t.equal(shut(), 1)
    t.equal(gates.openCount, opened)
    t.equal(store.weightVersion, 'default')
    t.match(await store.transactions.commit(id), {
      state: 'committed',
      outcome: 'new',
      writing: false,
      secondsLeft: null,
      missing: [],
      tornCount: 0
    })
    t.equal(gates.openCount, opened + 1)
    t.match(gates.last, { version: 'v2', flushCache: true, torn: null, epoch: store.epoch })
    t.equal(store.weightVersion, 'v2')
    await holds(t, () => 2)
    t.equal(store.transactions.current, null)
    await write(3)
    await holds(t, () => 3)
  })
}

t.test('a commit requires the expected names, lists the missing ones and leaves the transaction open', async t => {
  const { store, names, write, shut } = await setup(t)
  const expected = names.slice(0, 4)
  const { id } = await store.transactions.open({ owner: 'trainer', expected: [...expected, expected[0]!] })
  await write(2, expected.slice(0, 2), { transaction: id })
  await t.rejects(store.transactions.commit(id), {
    code: 'TRANSACTION_INCOMPLETE',
    message: new RegExp(
      `2 expected tensors have not been sent: ${expected[2]!}, ${expected[3]!}.*stays open, for 60 s`
    )
  })
  t.match(store.transactions.current, { id, state: 'open', writing: true, missing: expected.slice(2) })
  t.equal(shut(), 1)
  await write(2, names.slice(2, 9), { transaction: id })
  t.match(await store.transactions.commit(id), { state: 'committed', written: 9 })
  await t.rejects(store.transactions.open({ owner: 'trainer', expected: ['model.nothing', names[0]!] }), {
    code: 'WEIGHTS_UNKNOWN_NAME',
    message: /"model.nothing"/,
    param: 'expected'
  })
  t.equal(store.transactions.current, null)
})

t.test('fused experts cover the single ones that are expected, and the other way round', async t => {
  const { store, table, names, write } = await setup(t, 'Qwen3MoeForCausalLM')
  const fused = [...table.tensors.values()].filter(plan => plan.alternative).map(plan => plan.name)
  const single = names.filter(name => name.includes('.experts.'))
  for (const [expected, matched] of [[single, fused], [fused, single]] as const) {
    const { id, expected: count } = await store.transactions.open({ owner: 'trainer', expected })
    t.equal(count, single.length)
    await write(2, matched, { transaction: id })
    t.match(await store.transactions.commit(id), { state: 'committed', written: single.length })
  }
})

t.test('a copy that fails at any tensor keeps the gate shut until it is repeated', async t => {
  const { store, table, first, second, names, send, write, holds, torn, shut } = await setup(t)
  for (let at = 1; at <= second.length; at++) {
    await store.transactions.open({ owner: 'trainer', scope: true })
    await write(2, first)
    addon.armFault!({ point: 'copy', at, action: 'fail' })
    const error = await write(2, second).then(() => null, (error: RefitError) => error)
    addon.armFault!(null)
    if (error === null) {
      t.ok(at > 1, 'fewer copies than tensors')
    } else {
      const pending = store.transactions.current!.failed
      t.ok(pending.length > 0)
      t.same(torn().filter(name => !pending.includes(name)), [], 'torn tensors are pending')
      const refused = await store.transactions.commit(null).then(() => null, (error: RefitError) => error)
      t.match(refused, { code: 'TRANSACTION_INCOMPLETE', message: /were in a write that failed/ })
      t.equal(shut(), 1, 'nothing is generated')
      t.equal(store.weightVersion, 'default')
      // Alternates between the whole bucket and only the pending tensors.
      await send(memorySource(table, at % 2 === 0 ? second : pending, 2))
    }
    t.match(await store.transactions.commit(null), { state: 'committed', outcome: 'new', failedCount: 0, tornCount: 0 })
    t.equal(shut(), 0)
    await holds(t, () => 2)
    await write(1, names)
  }
})

t.test('the tensors of a refused bucket are pending', async t => {
  const { store, table, first, second, send, write, holds } = await setup(t)
  await store.transactions.open({ owner: 'trainer', scope: true })
  await write(2, first, { version: 'v2' })
  const strange = memorySource(
    table,
    second.slice(0, 2),
    2,
    tensor => tensor.name === second[0] ? { ...tensor, name: 'model.strange' } : tensor
  )
  await t.rejects(send(strange), { code: 'WEIGHTS_UNKNOWN_NAME' })
  t.match(store.transactions.current, { failed: [second[1]!], failedCount: 1, tornCount: 0, written: first.length })
  await t.rejects(store.transactions.commit(null), { code: 'TRANSACTION_INCOMPLETE' })
  await write(2, second)
  t.match(await store.transactions.commit(null), { state: 'committed', version: 'v2' })
  t.equal(store.weightVersion, 'v2')
  await holds(t, () => 2)
})

t.test('after a request is refused before its tensors are known, a commit requires all tensors', async t => {
  const { store: { transactions }, write, names, first, second, holds } = await setup(t)
  const scope = await transactions.open({ owner: 'a trainer', scope: true })
  await write(2, first)
  transactions.refused("somebody else's", 'no matter')
  transactions.refused(null, 'bad pickle')
  await t.rejects(transactions.commit(null), {
    code: 'TRANSACTION_INCOMPLETE',
    message:
      /before its tensors were known \(bad pickle\), so all are required; \d+ expected tensors have not been sent/
  })
  t.equal(transactions.currentId, scope.id)
  await write(2, second)
  t.match(await transactions.commit(null), { state: 'committed', outcome: 'new' })
  await holds(t, () => 2)
  // With expected names, a commit requires only these.
  const { id } = await transactions.open({ owner: 'mine', expected: first })
  transactions.refused(id, 'cut off')
  transactions.refused(null, 'of no scope')
  await write(3, first, { transaction: id })
  t.match(await transactions.commit(id), { state: 'committed' })
  await holds(t, name => names.indexOf(name) < first.length ? 3 : 2)
})

t.test('an abort changes nothing before a write, tears in the middle, and leaves all whole at the end', async t => {
  const { store, gates, names, first, write, holds, torn, shut } = await setup(t)
  const counts = { shut: gates.shutCount, epoch: store.epoch }
  for (const scope of [false, true]) {
    const { id } = await store.transactions.open({ owner: 'trainer', scope, version: 'never' })
    t.match(await store.transactions.abort(id, 'no need'), {
      state: 'aborted',
      outcome: 'old',
      reason: 'no need',
      tornCount: 0
    })
    t.same({ shut: gates.shutCount, epoch: store.epoch }, counts)
  }
  t.same(store.state, { state: 'current' })

  const { id } = await store.transactions.open({ owner: 'trainer', version: 'never' })
  await write(2, first, { transaction: id })
  t.match(await store.transactions.abort(id, 'the loss is NaN'), {
    state: 'aborted',
    outcome: 'torn',
    torn: [...first].sort(),
    tornCount: first.length
  })
  t.same(torn(), [...first].sort())
  t.match(gates.last, {
    torn: /the weight transaction of trainer was aborted after \d+ tensors of it had been written: the loss is NaN/
  })
  t.equal(shut(), 0)
  await holds(t, name => first.includes(name) ? null : 1)
  await write(3, first)
  t.same(store.state, { state: 'current' })

  const whole = await store.transactions.open({ owner: 'trainer', expected: first, version: 'never' })
  await write(2, first, { transaction: whole.id })
  t.match(await store.transactions.abort(whole.id, 'late'), { state: 'aborted', outcome: 'new', tornCount: 0 })
  await holds(t, name => first.includes(name) ? 2 : 1)
  t.equal(store.weightVersion, 'default')
  await write(1, names)
})

t.test('tensors that were torn before a transaction stay torn after it unless it writes them', async t => {
  const { store, names, write, torn, gates } = await setup(t)
  await store.scramble(7n)
  await store.transactions.open({ owner: 'trainer', scope: true })
  await write(2, names.slice(3), { version: 'v2' })
  t.match(await store.transactions.commit(null), { state: 'committed', tornCount: 3 })
  t.same(torn(), names.slice(0, 3).sort())
  t.match(gates.last, { torn: /weights are torn/ })
})

t.test('writes of several connections and a commit queue in the transaction with a result each', async t => {
  const { store, table, names, send, write, holds, shut } = await setup(t)
  const { id } = await store.transactions.open({ owner: 'trainer', expected: 'all', version: 'v2' })
  const one = held(memorySource(table, names.slice(0, 5), 2))
  const writes = [send(one.source, { transaction: id })]
  await one.inside
  for (let at = 5; at < names.length; at += 5) writes.push(write(2, names.slice(at, at + 5), { transaction: id }))
  await turn()
  const commit = store.transactions.commit(id)
  const late = write(3, names.slice(0, 1), { transaction: id })
  await turn()
  t.match(store.transactions.current, { written: 0, writing: true })
  one.go()
  for (const { transaction } of await Promise.all(writes)) t.equal(transaction, id)
  t.match(await commit, { state: 'committed', written: names.length, writes: writes.length })
  await t.rejects(late, { code: 'TRANSACTION_ENDED', message: /was committed/ })
  t.equal(shut(), 0)
  await holds(t, () => 2)
})

t.test('an abort waits for the write under way, refuses the waiting ones, and tears the written tensors', async t => {
  const { store, table, first, second, names, send, write, torn, shut, holds } = await setup(t)
  const { id } = await store.transactions.open({ owner: 'trainer' })
  const one = held(memorySource(table, first, 2))
  const writing = send(one.source, { transaction: id })
  await one.inside
  const waiting = [write(2, second, { transaction: id }), store.transactions.commit(id)].map(async call =>
    await call.then(() => 'done', (error: RefitError) => error.code)
  )
  const abort = store.transactions.abort(id, 'enough')
  t.same(await Promise.all(waiting), ['TRANSACTION_ENDED', 'TRANSACTION_ENDED'], 'at once')
  t.equal(shut(), 1)
  const after = write(3, names)
  one.go()
  // Its bytes have arrived, but the abort tears them: a 200 would be wrong.
  await t.rejects(writing, { code: 'TRANSACTION_ENDED', message: /was aborted: enough/ })
  t.match(await abort, { outcome: 'torn', torn: [...first].sort() })
  await after
  t.same(torn(), [], 'an update that arrived meanwhile waited for the end, and heals')
  await holds(t, () => 3)
})
