import t from 'tap'
import type { Test } from 'tap'
import { faultyAddon, storeOf } from '../helpers/core.ts'
import { memorySource } from '../helpers/memory-source.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'
import { missingNames } from '../../src/weights/plan.ts'
import type { WeightStoreOptions } from '../../src/weights/weight-store.ts'

// Release and resume of a real core's memory, with gates that no scheduler holds.

const addon = faultyAddon()

function setup (t: Test, options: Partial<WeightStoreOptions> = {}) {
  const made = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 2, 'bfloat16', options)
  const names = missingNames(made.table, new Set())
  const write = async (variant: number, some = names): Promise<void> => {
    const update = await made.store.update()
    try {
      await update.write(memorySource(made.table, some, variant))
      await update.commit({})
    } catch (error) {
      await update.abort('it failed')
      throw error
    }
  }
  t.teardown(() => {
    addon.armFault!(null)
    made.close()
  })
  return { ...made, names, write }
}

t.test('released weights are resumed torn at the same addresses, and an update restores them', async t => {
  const { store, gates, names, write } = setup(t)
  await write(1)
  const before = await store.checksums()
  const { addresses } = addon.coreInfo(store.core)
  const { epoch } = store

  const released = await store.release(['weights', 'kv_cache'])
  t.same(released.tags, ['weights', 'kv_cache'])
  t.ok(released.bytes >= addon.coreInfo(store.core).weightBytes)
  t.same(store.state, { state: 'asleep', tags: ['weights', 'kv_cache'] })
  t.equal(store.releasedMemory.weights, addon.coreInfo(store.core).weightBytes)
  t.equal(store.epoch, epoch, 'no bytes have changed yet that anybody could read')
  t.match(gates.last, {
    torn: null,
    asleep: /asleep: its memory is released \(weights, kv_cache\)/,
    flushCache: true,
    epoch
  })

  const resumed = await store.resume(['weights'])
  t.same(resumed.tags, ['weights'])
  t.match(store.state, { state: 'torn', reason: /came back empty/ })
  const { state } = store
  t.same(state.state === 'torn' ? state.tensors : [], [...names].sort(), 'all of them')
  t.equal(store.epoch, epoch + 1)
  t.match(gates.last, { torn: /came back empty/, asleep: /kv_cache/ })

  await write(1, names.slice(1))
    .then(() => t.fail('a commit of torn weights'), error => t.match(error, { code: 'WEIGHTS_TORN' }))
  await write(1)
  t.same(store.state, { state: 'asleep', tags: ['kv_cache'] })
  t.match(gates.last, { torn: null, asleep: /kv_cache/ })
  await store.resume()
  t.same(store.state, { state: 'current' })
  t.same(store.releasedMemory, {})
  t.match(gates.last, { torn: null, asleep: null, flushCache: true })
  t.same(await store.checksums(), before)
  t.same(addon.coreInfo(store.core).addresses, addresses)
  t.equal(gates.shutCount, gates.openCount)
})

t.test('weights with a copy in host memory are resumed unchanged, torn parts included', async t => {
  const { store, names, write } = setup(t, { keepWeights: true })
  await write(1)
  const before = await store.checksums()
  const { epoch } = store
  await store.release()
  t.same(store.state, { state: 'asleep', tags: ['weights', 'kv_cache', 'cuda_graph'] })
  await store.resume()
  t.same(store.state, { state: 'current' })
  t.equal(store.epoch, epoch, 'the weights are equal, so the cache stays valid')
  t.same(await store.checksums(), before)

  addon.armFault!({ point: 'copy', at: 3, action: 'fail' })
  await t.rejects(write(2), { code: 'WEIGHTS_TORN' })
  const torn = store.state
  const half = await store.checksums()
  await store.release(['weights'])
  await store.resume(['weights'])
  t.same(store.state, torn, 'a copy heals nothing')
  t.same(await store.checksums(), half)
  await write(2, names)
  t.same(store.state, { state: 'current' })
})

t.test('every wrong order is a CONFLICT that names the kind, and changes nothing', async t => {
  const { store, gates, write } = setup(t)
  await write(1)
  const conflict = async (run: () => Promise<unknown>, message: RegExp): Promise<void> => {
    const before = [store.state, store.epoch, store.releasedMemory, gates.shutCount, gates.openCount]
    await t.rejects(run(), { code: 'CONFLICT', message })
    t.same([store.state, store.epoch, store.releasedMemory, gates.shutCount, gates.openCount], before)
  }
  await conflict(async () => await store.resume(), /all memory \(cuda_graph, weights, kv_cache\) is not released/)
  await conflict(async () => await store.resume(['kv_cache']), /memory of kv_cache is not released/)
  await store.release(['kv_cache'])
  await conflict(async () => await store.release(['kv_cache']), /memory of kv_cache is released already/)
  await conflict(async () => await store.release(['weights', 'kv_cache']), /memory of kv_cache is released already/)
  await conflict(async () => await store.resume(['weights', 'kv_cache']), /memory of weights is not released/)
  t.same((await store.release()).tags, ['weights', 'cuda_graph'], 'all that is left')
  await conflict(async () => await store.release(), /all memory .* is released already/)
  await conflict(
    async () => await store.update(),
    /weights cannot be updated while their memory is released; .*\["weights"\]/
  )
  await conflict(async () => await store.checksums(), /weights cannot be read while/)
  await conflict(async () => await store.readTensor('model.norm.weight'), /weights cannot be read while/)
  await conflict(async () => {
    await store.scramble(1n)
  }, /weights cannot be updated while/)
  t.same((await store.resume(['cuda_graph', 'weights'])).tags, ['cuda_graph', 'weights'])
  await conflict(async () => await store.resume(['cuda_graph']), /memory of cuda_graph is not released/)
  t.ok((await store.checksums()).tensors.length > 0, 'torn weights can be looked at')
})

t.test('an update succeeds while only the KV cache is released', async t => {
  const { store, gates, write } = setup(t)
  await write(1)
  await store.release(['kv_cache'])
  await write(2)
  t.same(store.state, { state: 'asleep', tags: ['kv_cache'] })
  t.match(gates.last, { torn: null, asleep: /kv_cache/ })
  await store.resume(['kv_cache'])
  t.same(store.state, { state: 'current' })
})

t.test('requests held by a pause in place prevent a release of their KV, but not of weights', async t => {
  const { store, gates, write } = setup(t)
  await write(1)
  gates.holders = 3
  await t.rejects(store.release(['kv_cache']), {
    code: 'CONFLICT',
    message: /paused in place, and 3 requests need their KV cache .* "retract"/
  })
  await t.rejects(store.release(), { code: 'CONFLICT' })
  t.same(store.state, { state: 'current' })
  t.same(gates.shutCount, gates.openCount)
  await store.release(['weights'])
  t.match(gates.last, { flushCache: false })
  await store.resume(['weights'])
})

t.test('releases and resumes queue with the updates', async t => {
  const { store, table, names, write } = setup(t)
  await write(1)
  const order: string[] = []
  const update = await store.update()
  const release = store.release(['weights']).then(() => order.push('released'))
  const late = store.update().then(() => order.push('updated'), (error: { code: string }) => order.push(error.code))
  const resume = store.resume(['weights']).then(() => order.push('resumed'))
  await update.write(memorySource(table, names, 2))
  t.same(store.state, { state: 'current' }, 'not before the update has ended')
  await update.commit({})
  order.push('committed')
  await Promise.all([release, late, resume])
  t.same(order, ['committed', 'released', 'CONFLICT', 'resumed'])
})

t.test('a release waits for reads under way, and none begins after it', async t => {
  const { store, write } = setup(t)
  await write(1)
  const before = await store.checksums()
  const reads = [store.checksums(), store.checksums()]
  const row = store.readTensor('model.layers.1.mlp.down_proj.weight')
  await store.release()
  t.same(await Promise.all(reads), [before, before])
  t.ok((await row).values.some(value => value !== 0))
  await t.rejects(store.checksums(), { code: 'CONFLICT' })
})

t.test('without memory a copy is refused before anything changes, and a resume can be repeated', async t => {
  const { store, gates, write } = setup(t, { keepWeights: true })
  await write(1)
  const before = await store.checksums()
  addon.armFault!({ point: 'alloc', at: 1, action: 'fail' })
  await t.rejects(store.release(), {
    code: 'NO_MEMORY',
    message:
      /a copy of [\d.]+ MB of weights \(--enable-weights-cpu-backup\) does not fit into memory\. The weights in use/
  })
  t.same(store.state, { state: 'current' })
  t.same(await store.checksums(), before)
  t.match(gates.last, { torn: null, asleep: null })

  await store.release()
  addon.armFault!({ point: 'alloc', at: 2, action: 'fail' })
  await t.rejects(store.resume(), {
    code: 'NO_MEMORY',
    message: /memory of weights could not be allocated .* It stays released; free memory and try again/
  })
  t.same(store.state, { state: 'asleep', tags: ['weights', 'kv_cache'] }, 'the graphs came first, and are back')
  t.match(gates.last, { asleep: /weights, kv_cache/ })
  await store.resume()
  t.same(store.state, { state: 'current' })
  t.same(await store.checksums(), before)
})

t.test('with too little memory for the weights nothing changes, and the error has the numbers', async t => {
  let free = 1e12
  const { store, write } = setup(t, { keepWeights: true, availableBytes: () => free })
  await write(1)
  free = 1000
  await t.rejects(store.release(['weights']), {
    code: 'NO_MEMORY',
    message: /^[\d.]+ MB are needed and 0\.0 MB are available for a copy of the weights/
  })
  t.same(store.state, { state: 'current' })
  free = 1e12
  await store.release(['weights'])
  free = 5000
  await t.rejects(store.resume(['weights']), { code: 'NO_MEMORY', message: /They stay released/ })
  t.same(store.state, { state: 'asleep', tags: ['weights'] })
  free = 1e12
  await store.resume(['weights'])
  t.same(store.state, { state: 'current' })
})

t.test('on a GPU that cannot release memory, a release is refused and the weights do not change', async t => {
  const { store, gates, write } = setup(t, { releasable: false })
  await write(1)
  const before = await store.checksums()
  const { shutCount } = gates
  for (const tags of [undefined, ['weights'], ['kv_cache']] as const) {
    await t.rejects(store.release(tags), {
      code: 'UNSUPPORTED',
      message: /no virtual memory management .* Nothing has changed/
    })
  }
  t.equal(gates.shutCount, shutCount)
  t.same(store.state, { state: 'current' })
  t.same(await store.checksums(), before)
})

t.test('mappings are closed between two steps, without waiting for running requests or other updates', async t => {
  const closed: string[] = []
  const { store, gates, write } = setup(t, {
    addon: {
      ...addon,
      closeMappings: async (_core, name, access) => {
        closed.push(access?.beside === true ? `${name}, beside steps` : name)
        return 1
      }
    }
  })
  await write(1)
  t.not(gates.requested!.inPlace, true, 'a write waits for them')
  await store.closeMappings('pool')
  t.match(gates.requested, { abort: false, inPlace: true })
  // An update has its turn and has not requested the gate yet.
  const update = await store.update()
  await store.closeMappings('other')
  await update.abort('it only stood there')
  t.same(closed, ['pool', 'pool, beside steps', 'other', 'other, beside steps'])
  t.equal(store.mappings.counts.closed, 4)
  t.equal(gates.shutCount, gates.openCount)
})

t.test('a device that is lost in a write, a read, a release or a closing of mappings is reported once', async t => {
  const lost = Object.assign(new Error('rank 0, GPU 2 (H200): the copy of a write failed'), { code: 'DEVICE_LOST' })
  for (const operation of ['write', 'checksum', 'release', 'resume', 'closeMappings'] as const) {
    const broken = {
      ...addon,
      [operation]: async () => {
        throw lost
      }
    }
    const { store, gates, write } = setup(t, { addon: broken })
    if (operation === 'resume') await store.release()
    const run = {
      write: async () => await write(1),
      checksum: async () => await store.checksums(),
      release: async () => await store.release(['kv_cache']),
      resume: async () => await store.resume(),
      closeMappings: async () => {
        await store.closeMappings('pool')
      }
    }[operation]
    await t.rejects(run() as Promise<unknown>, { message: /rank 0, GPU 2/ })
    t.same(gates.losses, [lost.message], operation)
    t.equal(gates.shutCount, gates.openCount)
  }
})

t.test("a release can override the engine's setting for a copy of the weights", async t => {
  for (const keepWeights of [true, false]) {
    const { store, write } = setup(t, { keepWeights: !keepWeights })
    await write(1)
    const before = await store.checksums()
    await store.release(undefined, { keepWeights })
    await store.resume()
    t.equal(store.state.state, keepWeights ? 'current' : 'torn')
    if (keepWeights) t.same(await store.checksums(), before, 'bit for bit')
  }
  const { store, write } = setup(t, { availableBytes: () => 10 })
  await write(1)
  await t.rejects(store.release(['weights'], { keepWeights: true }), {
    code: 'NO_MEMORY',
    message: /sleep at level 1\)\. The weights in use have not changed/
  })
  t.equal(store.state.state, 'current')
})
