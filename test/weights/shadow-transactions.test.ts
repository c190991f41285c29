import t from 'tap'
import type { Test } from 'tap'
import { POSITIONS } from '../../src/native/deltas.ts'
import { DTYPES } from '../../src/native/dtypes.ts'
import { missingNames } from '../../src/weights/plan.ts'
import type { PatchSource } from '../../src/contract/weight-source.ts'
import { faultyAddon, storeOf } from '../helpers/core.ts'
import { codedChecksum, codedTensor, memorySource, MEMORY } from '../helpers/memory-source.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'

// Transactions and changes of elements on an engine with two sets of weights.

const addon = faultyAddon()

async function setUp (t: Test) {
  const made = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 2, 'bfloat16', { shadow: true })
  const { store, table } = made
  const names = missingNames(table, new Set())
  t.teardown(async () => {
    addon.armFault!(null)
    await store.close()
    made.close()
  })
  const write = async (variant: number, some: string[], transaction?: string): Promise<void> => {
    const update = await store.update(transaction === undefined ? {} : { transaction })
    try {
      await update.write(memorySource(table, some, variant))
      await update.commit({})
    } catch (error) {
      await update.abort('it failed')
      throw error
    }
  }
  /** Names whose weights in use are not those of the variant. */
  const wrong = async (variantOf: (name: string) => number): Promise<string[]> => {
    const { tensors } = await store.checksums()
    return tensors
      .filter(({ name, checksum }) => checksum !== codedChecksum(table, name, variantOf(name)))
      .map(({ name }) => name)
  }
  await write(1, names)
  return { ...made, names, first: names.filter((_, i) => i % 2 === 0), write, wrong }
}

/** Gives the elements of a tensor whose index has a remainder by 2 the value of a variant. */
function patch (name: string, shape: number[], variant: number, rest: 0 | 1): PatchSource {
  const wanted = codedTensor(variant, name, shape.reduce((a, b) => a * b))
  const at = Int32Array.from(wanted.keys()).filter(index => index % 2 === rest)
  const values = Uint16Array.from(at, index => wanted[index]!)
  const tensors = new Map([[name, [{
    encoding: POSITIONS.int32,
    positions: new Uint8Array(at.buffer),
    first: 0,
    values: new Uint8Array(values.buffer),
    dtype: DTYPES.bfloat16,
    xor: false
  }]]])
  return {
    kind: 'patch',
    transport: MEMORY,
    tensors: [{ name, dtype: 'bfloat16', shape, source: 0, offset: 0 }],
    patch: { tensors, bytes: at.length * 6 },
    verify: async () => {},
    close: async () => {}
  }
}

t.test('all parts of a transaction come into use at its commit, and generation goes on until then', async t => {
  const { store, gates, names, first, write, wrong } = await setUp(t)
  const shuts = gates.shutCount
  for (const variant of [2, 3]) {
    const { id } = await store.transactions.open({ owner: 'trainer', expected: 'all', version: `v${variant}` })
    await write(variant, first, id)
    t.match(store.transactions.current, { writing: false, written: first.length })
    t.same(await wrong(() => variant - 1), [])
    await write(variant, names.filter(name => !first.includes(name)), id)
    const swaps = gates.swaps.length
    t.match(await store.transactions.commit(id), { state: 'committed', outcome: 'new' })
    t.equal(gates.swaps.length, swaps + 1)
    t.same(await wrong(() => variant), [])
    t.equal(store.weightVersion, `v${variant}`)
  }
  t.equal(gates.shutCount, shuts)
})

t.test('a transaction that is given up, whole or in part, changes nothing, and its tensors are caught up', async t => {
  const { store, gates, names, first, write, wrong } = await setUp(t)
  for (const part of [first, names]) {
    const { id } = await store.transactions.open({ owner: 'trainer' })
    await write(7, part, id)
    const { epoch } = store
    const aborted = await store.transactions.abort(id, 'the trainer crashed')
    t.match(aborted, { state: 'aborted', outcome: 'old', tornCount: 0 })
    t.same(store.state, { state: 'current' })
    t.equal(store.epoch, epoch)
    t.same(await wrong(() => 1), [])
  }
  // The same owner begins again: the parts of the transaction before are not in it.
  await store.transactions.open({ owner: 'trainer' })
  await write(8, first, store.transactions.currentId!)
  const { id } = await store.transactions.open({ owner: 'trainer' })
  await write(2, [names[1]!], id)
  t.match(await store.transactions.commit(id), { outcome: 'new', written: 1 })
  t.same(await wrong(name => name === names[1] ? 2 : 1), [])
  t.equal(gates.shutCount, gates.openCount)
})

t.test('a bucket that failed is required before the commit', async t => {
  const { store, first, write, wrong } = await setUp(t)
  const { id } = await store.transactions.open({ owner: 'trainer' })
  addon.armFault!({ point: 'copy', at: 3, action: 'fail' })
  await t.rejects(write(2, first, id), { code: 'CHECKPOINT_FORMAT', message: /those in use have not changed/ })
  await t.rejects(store.transactions.commit(id), { code: 'TRANSACTION_INCOMPLETE' })
  t.same(await wrong(() => 1), [])
  await write(2, first, id)
  await store.transactions.commit(id)
  t.same(await wrong(name => first.includes(name) ? 2 : 1), [])
})

t.test('changes of elements are relative to the weights in use, and in a transaction to what it has sent', async t => {
  const { store, table, names, write, wrong } = await setUp(t)
  const name = names.find(name => name.includes('down_proj'))!
  const { shape } = table.tensors.get(name)!
  const apply = async (source: PatchSource, transaction?: string): Promise<void> => {
    const update = await store.update(transaction === undefined ? {} : { transaction })
    try {
      await update.write(source)
      await update.commit({})
    } catch (error) {
      await update.abort('it failed')
      throw error
    }
  }
  // All elements of variant 2 arrive in two updates: the second one relies on the first.
  await apply(patch(name, shape, 2, 0))
  t.same(await wrong(() => 1), [name])
  await apply(patch(name, shape, 2, 1))
  t.same(await wrong(other => other === name ? 2 : 1), [])

  const { id } = await store.transactions.open({ owner: 'trainer' })
  await write(3, [name], id)
  const half = patch(name, shape, 4, 0)
  await apply(half, id)
  // After the copy to the first rank.
  addon.armFault!({ point: 'copy', at: 2, action: 'fail' })
  await t.rejects(apply(half, id), { code: 'CHECKPOINT_FORMAT' })
  await t.rejects(apply(half, id), { code: 'CONFLICT', message: /send it whole first/ })
  t.same(await wrong(other => other === name ? 2 : 1), [], 'the weights in use are as before')
  await write(3, [name], id)
  await apply(half, id)
  await store.transactions.commit(id)
  const { values } = await store.readTensor(name)
  const [three, four] = [3, 4].map(variant => codedTensor(variant, name, values.length))
  const bits = new Uint32Array(values.buffer)
  t.ok(bits.every((got, i) => got >>> 16 === (i % 2 === 0 ? four : three)![i]))
})

t.test('an update names the way, and a transaction has one way for all of its updates', async t => {
  const { store, gates, table, names, write, wrong } = await setUp(t)
  const swaps = gates.swaps.length
  const inPlace = await store.update({ swap: 'in_place' })
  await inPlace.write(memorySource(table, names.slice(0, 3), 2))
  await inPlace.commit({})
  t.equal(gates.swaps.length, swaps, 'it was written in place')
  await write(3, names.slice(5))
  t.same(await wrong(name => names.indexOf(name) < 3 ? 2 : names.indexOf(name) < 5 ? 1 : 3), [])

  const { id } = await store.transactions.open({ owner: 'trainer' })
  await t.rejects(store.update({ transaction: id, swap: 'in_place' }), { code: 'CONFLICT', message: /second set/ })
  await (await store.update({ transaction: id, swap: 'demand' })).abort('only asked')
  await store.transactions.abort(id, 'over')
  const other = await store.transactions.open({ owner: 'trainer', swap: 'in_place' })
  await t.rejects(store.update({ transaction: other.id, swap: 'demand' }), { code: 'CONFLICT', message: /in place/ })
  await write(4, names, other.id)
  t.equal(gates.shutCount, gates.openCount + 1, 'in place, the gate is shut')
  await store.transactions.commit(other.id)
  t.same(await wrong(() => 4), [])

  const plain = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 1)
  t.teardown(plain.close)
  const refusal = { code: 'CONFLICT', message: /one set of weights.*--shadow-weights/ }
  await t.rejects(plain.store.update({ swap: 'demand' }), refusal)
  await t.rejects(plain.store.transactions.open({ owner: 'trainer', swap: 'demand' }), refusal)
  t.equal(plain.store.transactions.current, null)
  await (await plain.store.update({})).abort('the turn is free')
  t.equal(plain.store.sets, undefined)
})

t.test('without memory for the second set an update is refused, and one in place goes on', async t => {
  let available = Infinity
  const made = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 1, 'bfloat16', {
    shadow: true,
    keepWeights: true,
    availableBytes: () => available
  })
  t.teardown(made.close)
  const { store, table } = made
  const names = missingNames(table, new Set())
  const put = async (variant: number, swap: 'auto' | 'in_place'): Promise<void> => {
    const update = await store.update({ swap })
    try {
      await update.write(memorySource(table, names, variant))
      await update.commit({})
    } catch (error) {
      await update.abort('it failed')
      throw error
    }
  }
  await put(1, 'auto')
  await store.release(['weights'])
  await store.resume()
  available = 1000
  await t.rejects(put(2, 'auto'), {
    code: 'NO_MEMORY',
    message: /second set of weights.* are needed and 0\.0 MB are available.*swap "in_place"/
  })
  await put(3, 'in_place')
  t.equal(store.sets?.shadow.state, 'absent')
  available = Infinity
  addon.armFault!({ point: 'alloc', at: 1, action: 'fail' })
  await t.rejects(put(4, 'auto'), { code: 'NO_MEMORY' })
  await put(5, 'auto')
  const { tensors } = await store.checksums()
  t.ok(tensors.every(({ name, checksum }) => checksum === codedChecksum(table, name, 5)))
})
