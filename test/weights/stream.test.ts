import t from 'tap'
import assert from 'node:assert/strict'
import fc from 'fast-check'
import { faultyAddon, storeOf } from '../helpers/core.ts'
import { codedChecksum, memorySource, streamed } from '../helpers/memory-source.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'
import { RefitError } from '../../src/errors.ts'
import { missingNames } from '../../src/weights/plan.ts'
import type { StreamedSource, Transport, WeightSource } from '../../src/contract/weight-source.ts'
import type { WeightStore } from '../../src/weights/weight-store.ts'

const addon = faultyAddon()
async function apply (store: WeightStore, source: WeightSource): Promise<void> {
  const update = await store.update()
  try {
    await update.write(source)
    await update.commit({ version: 'done' })
  } catch (error) {
    await update.abort('failed')
    throw error
  }
}

for (const architecture of ['Qwen2ForCausalLM', 'Qwen3MoeForCausalLM'] as const) {
  for (const ranks of [1, 2]) {
    t.test(`${architecture} on ${ranks} ranks: bytes in pieces of any size end up in the same place`, async t => {
      const { store, table, close, gates } = storeOf(addon, tinyArchitecture(architecture), ranks)
      t.teardown(close)
      const names = missingNames(table, new Set())
      const size = (memorySource(table, names, 0).sources[0] as { buffer: Uint8Array }).buffer.length
      let variant = 0
      await fc.assert(
        fc.asyncProperty(fc.array(fc.integer({ min: 0, max: size }), { maxLength: 40 }), async cuts => {
          variant = 1 + variant % 3
          await store.scramble(BigInt(variant))
          await apply(store, streamed(memorySource(table, names, variant), cuts))
          const { tensors } = await store.checksums()
          assert.deepEqual(tensors, names.map(name => ({ name, checksum: codedChecksum(table, name, variant) })))
          assert.equal(store.state.state, 'current')
        }),
        { numRuns: 12 }
      )
      t.equal(gates.shutCount, gates.openCount)
      t.equal(store.weightVersion, 'done')
    })
  }
}

t.test('pieces of a few bytes, and cuts at and around every border of a tensor, give the same result', async t => {
  const { store, table, close } = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 2)
  t.teardown(close)
  const names = missingNames(table, new Set()).filter(name => /norm|bias|k_proj/.test(name))
  const whole = memorySource(table, names, 5)
  const cuts = whole.tensors.flatMap(({ offset, shape }) =>
    [-2, -1, 0, 1, 2, 3].flatMap(d => [offset + d, offset + 2 * shape.reduce((a, b) => a * b, 1) + d])
  )
  const bytes = (whole.sources[0] as { buffer: Uint8Array }).buffer.length
  for (
    const list of [
      cuts,
      Array.from({ length: Math.ceil(bytes / 509) }, (_, i) => i * 509),
      Array.from({ length: 400 }, (_, i) => 4 + i)
    ]
  ) {
    await store.scramble(9n)
    const update = await store.update()
    await update.write(streamed(whole, list))
    await update.commit({ allowTorn: true })
    const { tensors } = await store.checksums()
    for (const { name, checksum } of tensors.filter(({ name }) => names.includes(name))) {
      t.equal(checksum, codedChecksum(table, name, 5), name)
    }
  }
})

t.test('if the pieces break off, whole tensors are new, the rest is torn by name, and the label stays', async t => {
  const { store, table, close, gates } = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 2)
  t.teardown(close)
  const names = missingNames(table, new Set())
  const size = (memorySource(table, names, 1).sources[0] as { buffer: Uint8Array }).buffer.length
  const cuts = Array.from({ length: 15 }, (_, i) => Math.floor(size * (i + 1) / 16) + i % 3)
  for (const after of [1, 2, 7, 15]) {
    await apply(store, memorySource(table, names, 1))
    const error = new RefitError('BODY_BROKEN', 'the body broke off')
    const source = streamed(memorySource(table, names, 2), cuts, { after, error })
    await t.rejects(apply(store, source), { code: 'WEIGHTS_TORN', message: /the body broke off/, cause: error })
    const { state } = store
    const arrived = new Set(
      source
        .tensors
        .filter(({ offset, shape }) => offset + 2 * shape.reduce((a, b) => a * b, 1) <= [...cuts, size][after - 1]!)
        .map(({ name }) => name)
    )
    t.same(state, {
      state: 'torn',
      tensors: names.filter(name => !arrived.has(name)).sort(),
      reason: state.state === 'torn' ? state.reason : ''
    })
    for (const { name, checksum } of (await store.checksums()).tensors) {
      if (arrived.has(name)) t.equal(checksum, codedChecksum(table, name, 2), name)
    }
    t.match(gates.last?.torn, /torn/)
    t.equal(gates.last?.version, 'done')
  }
  const late = streamed(memorySource(table, names, 2), cuts, {
    after: 16,
    error: new RefitError('BODY_BROKEN', 'the body broke off')
  })
  await t.rejects(apply(store, late), {
    code: 'WEIGHTS_TORN',
    message: /the body broke off\. All tensors that the model needs of it had been written, and the label has not moved/
  })
  t.equal(store.state.state, 'current')
  await apply(store, memorySource(table, names, 3))
  t.equal(store.state.state, 'current')
})

t.test('pieces that break off before the first write change nothing and stop no step', async t => {
  const { store, table, close, gates } = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 1)
  t.teardown(close)
  const names = missingNames(table, new Set())
  await apply(store, memorySource(table, names, 1))
  const before = await store.checksums()
  const shut = gates.shutCount
  await t.rejects(
    apply(
      store,
      streamed(memorySource(table, names, 2), [100], {
        after: 0,
        error: new RefitError('BODY_STALLED', 'no byte came')
      })
    ),
    { code: 'BODY_STALLED', message: 'no byte came' }
  )
  const wrong = streamed(memorySource(table, names, 2, tensor => ({ ...tensor, name: `${tensor.name}x` })), [100])
  await t.rejects(apply(store, wrong), { code: 'WEIGHTS_UNKNOWN_NAME' })
  t.equal(wrong.requested(), 0, 'no piece was requested')
  t.equal(gates.shutCount, shut)
  t.same(await store.checksums(), before)
  t.equal(store.state.state, 'current')
})

t.test('a piece that cannot be written leaves incomplete tensors torn', async t => {
  const { store, table, close } = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 2)
  t.teardown(close)
  t.teardown(() => {
    addon.armFault!(null)
  })
  const names = missingNames(table, new Set())
  await apply(store, memorySource(table, names, 1))
  const size = (memorySource(table, names, 1).sources[0] as { buffer: Uint8Array }).buffer.length
  addon.armFault!({ point: 'copy', at: 30, action: 'fail' })
  await t.rejects(apply(store, streamed(memorySource(table, names, 2), [size >> 2, size >> 1])), {
    code: 'WEIGHTS_TORN',
    message: /injected fault/
  })
  addon.armFault!(null)
  const { state } = store
  if (state.state !== 'torn') return t.fail('nothing is torn')
  for (const { name, checksum } of (await store.checksums()).tensors) {
    if (!state.tensors.includes(name)) t.equal(checksum, codedChecksum(table, name, 2), name)
  }
  await apply(store, streamed(memorySource(table, names, 3), [size >> 2]))
  t.same((await store.checksums()).tensors, names.map(name => ({ name, checksum: codedChecksum(table, name, 3) })))
})

t.test('a stream that ends early without an error is refused as incomplete', async t => {
  const { store, table, close } = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 1)
  t.teardown(close)
  const names = missingNames(table, new Set())
  const whole = memorySource(table, names, 1)
  const { buffer } = whole.sources[0] as { buffer: Uint8Array }
  await t.rejects(
    apply(store, streamed({ ...whole, sources: [{ buffer: buffer.subarray(0, buffer.length - 64) }] }, [])),
    { code: 'WEIGHTS_TORN', message: /bytes ended/ }
  )
})

t.test('reports, torn tensors and unread bytes are named as the transport of the source defines', async t => {
  const { store, table, close } = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 1)
  t.teardown(close)
  const whole = memorySource(table, missingNames(table, new Set()), 1)
  const size = (whole.sources[0] as { buffer: Uint8Array }).buffer.length
  const error = new Error('the cable is out')
  const source = (transport: Transport, after?: number): StreamedSource => {
    const sent = streamed(whole, [size >> 1], after === undefined ? undefined : { after, error })
    return { ...sent, transport, stream: { ...sent.stream, ready: async () => {} } }
  }
  const cable: Transport = { name: 'cable', readError: 'TENSOR_PAYLOAD' }
  const update = await store.update()
  const report = await update.write(source(cable))
  t.equal(report.source, 'cable')
  t.notOk('bytesInPlace' in report)
  t.match(await update.write(source({ ...cable, inPlace: true })), { bytesInPlace: 0 })
  await update.commit({})
  for (const readError of ['TENSOR_PAYLOAD', 'INTERNAL'] as const) {
    await t.rejects(apply(store, source({ ...cable, readError }, 0)), {
      code: readError,
      message: /^reading failed at tensor ".*" before anything was written: the cable is out$/
    })
  }
  t.equal(store.state.state, 'current')
  await t.rejects(apply(store, source(cable, 1)), { code: 'WEIGHTS_TORN' })
  t.match(store.state, { state: 'torn', reason: /^a write from cable failed at tensor ".*": the cable is out$/ })
})
