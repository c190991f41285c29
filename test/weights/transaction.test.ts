import t from 'tap'
import type { Test } from 'tap'
import { setImmediate as turn } from 'node:timers/promises'
import { faultyAddon, storeOf } from '../helpers/core.ts'
import { ManualClock } from '../helpers/manual-clock.ts'
import { codedChecksum, memorySource } from '../helpers/memory-source.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'
import { RefitError } from '../../src/errors.ts'
import { missingNames } from '../../src/weights/plan.ts'
import type { StoredSource, StreamedSource, WeightSource } from '../../src/contract/weight-source.ts'

// Transactions over a real core, behind gates that nobody holds, by a clock that moves when it is told to.

const addon = faultyAddon()

async function setup (t: Test, architecture: Parameters<typeof tinyArchitecture>[0] = 'Qwen3ForCausalLM') {
  const clock = new ManualClock()
  const made = storeOf(addon, tinyArchitecture(architecture), 2, 'bfloat16', { clock, deadlineMs: 60_000 })
  const { store, table, gates } = made
  const names = missingNames(table, new Set())
  const middle = names.length >> 1
  /** What an update route does with one request. */
  const send = async (
    source: WeightSource,
    { transaction, version }: { transaction?: string, version?: string } = {}
  ) => {
    const update = await store.update(transaction === undefined ? {} : { transaction })
    try {
      const report = await update.write(source)
      await update.commit({ flushCache: true, allowTorn: true, ...version === undefined ? {} : { version } })
      return report
    } catch (error) {
      await update.abort('it failed')
      throw error
    }
  }
  const write = async (variant: number, some = names, options: { transaction?: string, version?: string } = {}) =>
    await send(memorySource(table, some, variant), options)
  const holds = async (t: Test, variantOf: (name: string) => number | null): Promise<void> => {
    const { tensors } = await store.checksums()
    const known = tensors.filter(({ name }) => variantOf(name) !== null)
    t.same(known, known.map(({ name }) => ({ name, checksum: codedChecksum(table, name, variantOf(name)!) })))
  }
  const torn = (): string[] => store.state.state === 'torn' ? store.state.tensors : []
  t.teardown(async () => {
    addon.armFault!(null)
    await store.close()
    made.close()
  })
  await write(1)
  return {
    ...made,
    clock,
    names,
    first: names.slice(0, middle),
    second: names.slice(middle),
    send,
    write,
    holds,
    torn,
    shut: () => gates.shutCount - gates.openCount
  }
}

/** A source that stops inside of the gate until it is let go, and fails then if it is told to. */
function held (source: WeightSource): { source: WeightSource, inside: Promise<void>, go: (error?: Error) => void } {
  let arrive = (): void => {}
  let go: (error?: Error) => void = () => {}
  const inside = new Promise<void>(resolve => {
    arrive = resolve
  })
  const going = new Promise<void>((resolve, reject) => {
    go = error => {
      error === undefined ? resolve() : reject(error)
    }
  })
  going.catch(() => {})
  return {
    source: {
      ...source,
      verify: async () => {
        arrive()
        await going
      }
    },
    inside,
    go
  }
}

/** A source of which nobody knows afterwards what it wrote: all of it is torn. */
function breaking (source: WeightSource): WeightSource {
  let calls = 0
  return {
    ...source,
    verify: async () => {
      if (++calls === 2) throw new RefitError('CHECKPOINT_CHANGED', 'it moved')
    }
  }
}

const PIECE_OVERLAP = 4
const PIECES = 40

/** The bytes of a source in pieces that come one after another; none after `last` ever does. */
function streamed (
  source: StoredSource,
  pieces: number,
  last = pieces
): { source: StreamedSource, begun: Promise<void>, given: () => number } {
  const { buffer } = source.sources[0] as { buffer: Buffer }
  const size = Math.ceil(buffer.length / pieces)
  let given = 0
  let begin = (): void => {}
  const begun = new Promise<void>(resolve => {
    begin = resolve
  })
  const next = async () => {
    await turn()
    if (given === pieces) return undefined
    if (given === last) return await new Promise<never>(() => {})
    const at = Math.max(0, given * size - PIECE_OVERLAP)
    const bytes = buffer.subarray(at, ++given * size)
    if (given === last) begin()
    return { begin: at, length: bytes.length, source: { buffer: bytes } }
  }
  const { tensors, verify, close } = source
  const stream = { ready: async () => {}, next }
  return {
    source: { kind: 'streamed', transport: 'memory', tensors, verify, close, stream },
    begun,
    given: () => given
  }
}

for (const architecture of ['LlamaForCausalLM', 'Qwen3MoeForCausalLM'] as const) {
  t.test(`${architecture}: from the first write to the commit the gate is shut once, and label and caches wait for the end`, async t => {
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
    t.equal(shut(), 0, 'nothing stands still before a write')
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

t.test('a commit demands the expected names, says which are missing, and leaves the transaction open', async t => {
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

t.test('a copy that fails at any tensor keeps the gate shut until it is repeated, from whatever is torn on', async t => {
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
      const owed = store.transactions.current!.failed
      t.ok(owed.length > 0)
      t.same(torn().filter(name => !owed.includes(name)), [], 'what is torn is owed')
      const refused = await store.transactions.commit(null).then(() => null, (error: RefitError) => error)
      t.match(refused, { code: 'TRANSACTION_INCOMPLETE', message: /were in a write that failed/ })
      t.equal(shut(), 1, 'nothing is generated')
      t.equal(store.weightVersion, 'default')
      // Every other time the whole bucket, else what is owed alone.
      await send(memorySource(table, at % 2 === 0 ? second : owed, 2))
    }
    t.match(await store.transactions.commit(null), { state: 'committed', outcome: 'new', failedCount: 0, tornCount: 0 })
    t.equal(shut(), 0)
    await holds(t, () => 2)
    await write(1, names)
  }
})

t.test('a bucket that is refused is owed as well, from the first byte on that it would have brought', async t => {
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

t.test('a request that is refused before its tensors are known is owed: then all must be brought', async t => {
  const { store: { transactions }, write, names, first, second, holds } = await setup(t)
  const scope = await transactions.open({ owner: 'a trainer', scope: true })
  await write(2, first)
  transactions.refused("somebody else's", 'no matter')
  transactions.refused(null, 'bad pickle')
  await t.rejects(transactions.commit(null), {
    code: 'TRANSACTION_INCOMPLETE',
    message:
      /refused before its tensors were known \(bad pickle\), so all are required; \d+ expected tensors have not been sent/
  })
  t.equal(transactions.currentId, scope.id)
  await write(2, second)
  t.match(await transactions.commit(null), { state: 'committed', outcome: 'new' })
  await holds(t, () => 2)
  // Where names are expected, those are all.
  const { id } = await transactions.open({ owner: 'mine', expected: first })
  transactions.refused(id, 'cut off')
  transactions.refused(null, 'of no scope')
  await write(3, first, { transaction: id })
  t.match(await transactions.commit(id), { state: 'committed' })
  await holds(t, name => names.indexOf(name) < first.length ? 3 : 2)
})

t.test('given up before a write, nothing has changed; in the midst, what was written is torn and named; at the end, it is whole', async t => {
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

t.test('a transaction that tore and healed nothing else ends with what was torn before it still torn', async t => {
  const { store, names, write, torn, gates } = await setup(t)
  await store.scramble(7n)
  await store.transactions.open({ owner: 'trainer', scope: true })
  await write(2, names.slice(3), { version: 'v2' })
  t.match(await store.transactions.commit(null), { state: 'committed', tornCount: 3 })
  t.same(torn(), names.slice(0, 3).sort())
  t.match(gates.last, { torn: /weights are torn/ })
})

t.test('writes of several connections queue inside, a commit queues behind them, and each is told what became of it', async t => {
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

t.test('an abort waits for the write under way, sends away those that wait, and tears what was written', async t => {
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
  // Its bytes are in, but not for long: 200 would be a lie.
  await t.rejects(writing, { code: 'TRANSACTION_ENDED', message: /was aborted: enough/ })
  t.match(await abort, { outcome: 'torn', torn: [...first].sort() })
  await after
  t.same(torn(), [], 'an update that came meanwhile has waited for the end, and heals')
  await holds(t, () => 3)
})

t.test('strangers get 409 with the owner and the seconds left: updates, releases, resumes, noise, labels, other transactions', async t => {
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

t.test("a transaction ends at its deadline however busy it was; a trainer's scope only when nothing came for so long", async t => {
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
    'the end is not told that all is well'
  )
  await write(1, names)
  await holds(t, () => 1)
  t.equal(clock.armed, 0)
})

t.test('a write that is under way when the deadline comes is finished, and no scope is idle meanwhile', async t => {
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

t.test('its owner may begin anew after a crash: the gate stays shut, what the first wrote is torn, and the second heals it', async t => {
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
  // Nothing was written: nothing is torn.
  await store.transactions.open({ owner: 'begin', scope: true })
  await store.transactions.open({ owner: 'begin', scope: true })
  t.match(await store.transactions.commit(null), { state: 'committed', outcome: 'old' })
  t.same(store.state, { state: 'current' })
})

t.test('two begins and a deadline at once leave one scope open and nothing stuck', async t => {
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

t.test('a transaction waits for the updates before it; who waits behind it belongs to a scope, and is a stranger to a transaction', async t => {
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

t.test('commits and aborts may be repeated, and not exchanged', async t => {
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

t.test('weights that sleep cannot be written, and the turn is given back', async t => {
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

t.test('a label without a write moves at the end, with the gate', async t => {
  const { store, gates } = await setup(t)
  const { id } = await store.transactions.open({ owner: 'trainer', version: 'a' })
  const shut = gates.shutCount
  t.match(await store.transactions.commit(id, { version: 'b', flushCache: false }), { outcome: 'old', version: 'b' })
  t.equal(gates.shutCount, shut + 1)
  t.match(gates.last, { version: 'b', flushCache: false, torn: null })
})

t.test('what a broken write tore is torn after an abort, too, and the rest of the scope with it', async t => {
  const { store, table, first, second, send, write, torn } = await setup(t)
  const { id } = await store.transactions.open({ owner: 'begin', scope: true })
  await write(2, first)
  await t.rejects(send(breaking(memorySource(table, second.slice(0, 2), 2))), { code: 'WEIGHTS_TORN' })
  t.match(store.transactions.current, { failed: second.slice(0, 2), torn: second.slice(0, 2).sort() })
  t.match(await store.transactions.abort(id, 'gone'), { outcome: 'torn' })
  t.same(torn(), [...first, ...second.slice(0, 2)].sort())
})

t.test('streams of several connections are written beside one another, with one gate; what brings the same waits, and so does a commit', async t => {
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

t.test('an abort and a deadline do not wait for bytes that never come, and name what they leave torn', async t => {
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

t.test('coverage is counted from the pause, whatever is paused again or opened in its midst', async t => {
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

t.test('a commit that waits behind a write sets the label that this one named', async t => {
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

t.test('a label that comes while a commit opens the gate is refused, not forgotten', async t => {
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

t.test('many streams at once are no reason for a warning', async t => {
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
