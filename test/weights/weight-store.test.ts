import { closeSync, openSync, truncateSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import assert from 'node:assert/strict'
import fc from 'fast-check'
import { faultyAddon, storeOf } from '../helpers/core.ts'
import { codedChecksum, codedTensor, memorySource } from '../helpers/memory-source.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'
import { RefitError } from '../../src/errors.ts'
import { missingNames } from '../../src/weights/plan.ts'
import type { WeightStore } from '../../src/weights/weight-store.ts'
import type { ModelTable } from '../../src/model/architecture.ts'

const addon = faultyAddon()
const primary = (table: ModelTable): string[] => missingNames(table, new Set())

async function load (store: WeightStore, names: string[], variant: number): Promise<void> {
  const update = await store.update()
  await update.write(memorySource(store.table, names, variant))
  await update.commit({})
}

for (
  const architecture of ['LlamaForCausalLM', 'Qwen2ForCausalLM', 'Qwen3ForCausalLM', 'Qwen3MoeForCausalLM'] as const
) {
  for (const ranks of [1, 2, 4]) {
    t.test(`${architecture} on ${ranks} ranks holds exactly what was sent, through A, B, A`, async t => {
      const { store, table, gates, close } = storeOf(addon, tinyArchitecture(architecture), ranks)
      t.teardown(close)
      const addresses = addon.coreInfo(store.core).addresses
      const names = primary(table)
      for (const variant of [1, 2, 1]) {
        await load(store, names, variant)
        const { tensors, ranks: shares } = await store.checksums()
        t.same(
          tensors,
          names.map(name => ({ name, checksum: codedChecksum(table, name, variant) })),
          `variant ${variant}`
        )
        t.equal(shares.length, ranks)
      }
      t.same(addon.coreInfo(store.core).addresses, addresses, 'no parameter moved')
      t.equal(gates.shutCount, 3)
      t.equal(gates.openCount, 3)
    })
  }
}

t.test('a tensor is read back whole and by rows, gathered from its ranks', async t => {
  const { store, table, close } = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 2)
  t.teardown(close)
  await load(store, primary(table), 3)
  const value = new DataView(new ArrayBuffer(4))
  for (
    const name of [
      'model.layers.1.self_attn.o_proj.weight',
      'model.layers.0.self_attn.k_proj.weight',
      'model.layers.0.mlp.down_proj.weight',
      'model.norm.weight',
      'model.embed_tokens.weight'
    ]
  ) {
    const plan = table.tensors.get(name)!
    for (const rows of [undefined, 1, 3]) {
      const { values, shape } = await store.readTensor(name, rows)
      t.equal(shape[0], Math.min(plan.rows, rows ?? Infinity))
      const bits = codedTensor(3, name, plan.rows * plan.cols)
      t.ok(
        values.every((got, index) => {
          value.setUint32(0, bits[index]! << 16)
          return got === value.getFloat32(0)
        }),
        `${name} rows ${rows}`
      )
    }
  }
  await t.rejects(store.readTensor('model.layers.9.mlp.down_proj.weight'), { code: 'NOT_FOUND' })
})

t.test('an invalid source is refused before the gate is shut and before anything is written', async t => {
  const { store, table, gates, close } = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 2)
  t.teardown(close)
  const names = primary(table)
  await load(store, names, 1)
  const before = await store.checksums()
  const update = await store.update()
  const wrong = [
    [
      memorySource(table, names, 2, tensor =>
        tensor
            .name
            .includes('1.mlp.up')
          ? { ...tensor, name: 'model.layers.1.mlp.upp.weight' }
          : tensor),
      'WEIGHTS_UNKNOWN_NAME'
    ],
    [
      memorySource(table, names, 2, tensor =>
        tensor
            .name
            .includes('1.mlp.up')
          ? { ...tensor, shape: [...tensor.shape].reverse() }
          : tensor),
      'WEIGHTS_MISMATCH'
    ],
    [memorySource(table, [...names, names[3]!], 2), 'WEIGHTS_MISMATCH']
  ] as const
  for (const [source, code] of wrong) await t.rejects(update.write(source), { code })
  await update.abort('refused')
  t.equal(gates.shutCount, 1, 'only the load shut it')
  t.same(await store.checksums(), before)
  t.same(store.state, { state: 'current' })
})

t.test('a source that changes while it waits for the gate is refused, and nothing is torn', async t => {
  const { store, table, close } = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 2)
  t.teardown(close)
  const names = primary(table)
  await load(store, names, 1)
  const source = {
    ...memorySource(table, names, 2),
    verify: async () => {
      throw new RefitError('CHECKPOINT_CHANGED', 'it moved')
    }
  }
  const update = await store.update()
  await t.rejects(update.write(source), { code: 'CHECKPOINT_CHANGED' })
  await update.abort('refused')
  t.same(store.state, { state: 'current' })
  t.same(
    (await store.checksums()).tensors.map(tensor => tensor.checksum),
    names.map(name => codedChecksum(table, name, 1))
  )
})

t.test('a source that changes while it is written tears all its tensors', async t => {
  const { store, table, close } = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 2)
  t.teardown(close)
  const names = primary(table)
  await load(store, names, 1)
  let calls = 0
  const source = {
    ...memorySource(table, names.slice(2, 5), 2),
    verify: async () => {
      if (++calls === 2) throw new RefitError('CHECKPOINT_CHANGED', 'it moved')
    }
  }
  const update = await store.update()
  await t.rejects(update.write(source), { code: 'WEIGHTS_TORN', message: /it moved/ })
  await update.abort('torn')
  t.match(store.state, { state: 'torn', tensors: names.slice(2, 5).sort() })
})

t.test('a file that ends inside its first tensor tears this tensor, although no tensor was written whole', async t => {
  const { store, table, gates, close } = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 2)
  t.teardown(close)
  const names = primary(table)
  await load(store, names, 1)
  const path = join(t.testdir(), 'weights')
  const one = names.filter(name => name === 'model.embed_tokens.weight')
  const whole = memorySource(table, one, 2)
  writeFileSync(path, (whole.sources[0] as { buffer: Uint8Array }).buffer)
  truncateSync(path, whole.tensors[0]!.offset + 100)
  const fd = openSync(path, 'r')
  t.teardown(() => {
    closeSync(fd)
  })
  const update = await store.update()
  await t.rejects(update.write({ ...whole, sources: [{ fd }] }), {
    code: 'WEIGHTS_TORN',
    message: /the write failed at tensor "model\.embed_tokens\.weight": file ended at byte .* Torn: /
  })
  await update.abort('torn')
  t.match(store.state, { state: 'torn', tensors: one })
  t.match(gates.last, { torn: /model\.embed_tokens\.weight/ })
  // Ended before its first byte: nothing has changed.
  await load(store, names, 1)
  truncateSync(path, whole.tensors[0]!.offset)
  const again = await store.update()
  await t.rejects(again.write({ ...whole, sources: [{ fd }] }), {
    code: 'CHECKPOINT_FORMAT',
    message: /before anything was written/
  })
  await again.abort('refused')
  t.same(store.state, { state: 'current' })
})

t.test('a copy that fails at any tensor tears the rest and keeps the label, and a repeat heals it', async t => {
  const { store, table, gates, close } = storeOf(addon, tinyArchitecture('LlamaForCausalLM'), 2)
  t.teardown(() => {
    addon.armFault!(null)
    close()
  })
  const names = primary(table)
  await load(store, names, 1)
  for (let at = 1; at <= names.length; at++) {
    addon.armFault!({ point: 'copy', at, action: 'fail' })
    const update = await store.update()
    const failure = await update.write(memorySource(table, names, 2)).then(
      () => null,
      (error: { code: string }) => error
    )
    addon.armFault!(null)
    if (failure === null) {
      t.ok(at > 1, 'fewer copies than tensors')
      await update.commit({})
      continue
    }
    const epoch = store.epoch
    const { tensors } = await store.checksums()
    const state = store.state
    const torn = new Set(state.state === 'torn' ? state.tensors : [])
    if (torn.size === 0) {
      t.same(
        tensors,
        names.map(name => ({ name, checksum: codedChecksum(table, name, 1) })),
        'refused whole'
      )
    }
    for (const { name, checksum } of tensors) {
      if (!torn.has(name) && torn.size > 0) t.equal(checksum, codedChecksum(table, name, 2), `${name} is whole`)
    }
    await t.rejects(
      update.commit({ version: 'never' }).then(() => {
        if (torn.size === 0) throw Object.assign(new Error(), { code: 'WEIGHTS_TORN' })
      }),
      { code: 'WEIGHTS_TORN' }
    )
    if (torn.size > 0) {
      await update.write(memorySource(table, [...torn], 2))
      t.ok(store.epoch > epoch)
      await update.commit({ version: `healed-${at}` })
      t.equal(gates.last!.torn, null)
      t.equal(store.weightVersion, `healed-${at}`)
      t.same((await store.checksums()).tensors, names.map(name => ({ name, checksum: codedChecksum(table, name, 2) })))
    }
    await load(store, names, 1)
  }
})

t.test('an update that is aborted while torn opens the gate with the reason and lists the torn tensors', async t => {
  const { store, table, gates, close } = storeOf(addon, tinyArchitecture('Qwen2ForCausalLM'), 1)
  t.teardown(() => {
    addon.armFault!(null)
    close()
  })
  const names = primary(table)
  await load(store, names, 1)
  addon.armFault!({ point: 'copy', at: 3, action: 'fail' })
  const update = await store.update()
  await t.rejects(update.write(memorySource(table, names, 2)), { code: 'WEIGHTS_TORN', message: /Repeat the update/ })
  addon.armFault!(null)
  await update.abort('given up')
  t.match(gates.last!.torn, /weights are torn/)
  t.match(store.state, { state: 'torn' })
  await load(store, names, 2)
  t.equal(gates.last!.torn, null)
})

t.test('experts fused into one tensor cannot be mixed with single ones', async t => {
  const { store, table, close } = storeOf(addon, tinyArchitecture('Qwen3MoeForCausalLM'), 2)
  t.teardown(close)
  const names = primary(table)
  await load(store, names, 1)
  const fused = [...table.tensors.values()].filter(plan => plan.alternative && plan.name.includes('layers.0.')).map(
    plan => plan.name
  )
  t.equal(fused.length, 2)
  const update = await store.update()
  await t.rejects(update.write(memorySource(table, [...names, fused[0]!], 1)), {
    code: 'WEIGHTS_MISMATCH',
    message: /both contain/
  })
  await update.abort('refused')
  t.same(
    (await store.checksums()).tensors.map(tensor => tensor.checksum),
    names.map(name => codedChecksum(table, name, 1))
  )
})

t.test('a fused tensor heals exactly the experts that it contains', async t => {
  const { store, table, close } = storeOf(addon, tinyArchitecture('Qwen3MoeForCausalLM'), 2)
  t.teardown(close)
  const names = primary(table)
  const single = names.filter(name => name.includes('layers.0.mlp.experts.'))
  const rest = names.filter(name => !single.includes(name))
  const fused = [...table.tensors.values()].filter(plan => plan.alternative && plan.name.includes('layers.0.')).map(
    plan => plan.name
  )
  const update = await store.update()
  await update.write(memorySource(table, rest, 1))
  t.match(store.state, { state: 'torn', tensors: [...single].sort() })
  const report = await update.write(memorySource(table, fused, 1))
  t.equal(report.missingCount, 0)
  await update.commit({ requireAll: true })
  t.same(store.state, { state: 'current' })
})

t.test('scrambled weights are torn until all of them have been written', async t => {
  const { store, table, close } = storeOf(addon, tinyArchitecture('Qwen3MoeForCausalLM'), 2)
  t.teardown(close)
  const names = primary(table)
  await load(store, names, 1)
  await store.scramble(7n)
  t.match(store.state, { state: 'torn', tensors: [...names].sort() })
  const update = await store.update()
  await update.write(memorySource(table, names.slice(1), 1))
  await t.rejects(update.commit({}), { code: 'WEIGHTS_TORN', message: new RegExp(names[0]!.replaceAll('.', '\\.')) })
  await update.write(memorySource(table, names.slice(0, 1), 1))
  await update.commit({ requireAll: true })
  t.same(
    (await store.checksums()).tensors.map(tensor => tensor.checksum),
    names.map(name => codedChecksum(table, name, 1))
  )
})

t.test('random programs of whole, partial and failing updates agree with a reference', async t => {
  const { store, table, gates, close } = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 2)
  t.teardown(() => {
    addon.armFault!(null)
    close()
  })
  const names = primary(table)
  const known = new Map<string, string>()
  const sumOf = (name: string, variant: number): string => {
    const key = `${name} ${variant}`
    if (!known.has(key)) known.set(key, codedChecksum(table, name, variant))
    return known.get(key)!
  }
  const command = fc.record({
    names: fc.subarray(names, { minLength: 1 }),
    variant: fc.integer({ min: 0, max: 2 }),
    failAt: fc.option(fc.integer({ min: 1, max: 30 }), { nil: null }),
    end: fc.constantFrom('commit', 'abort')
  })
  await fc.assert(
    fc.asyncProperty(fc.array(command, { minLength: 1, maxLength: 6 }), async program => {
      await load(store, names, 0)
      const holds = new Map<string, number | 'torn'>(names.map(name => [name, 0]))
      let version = store.weightVersion
      for (const [index, step] of program.entries()) {
        if (step.failAt !== null) addon.armFault!({ point: 'copy', at: step.failAt, action: 'fail' })
        const update = await store.update()
        const code = await update.write(memorySource(table, step.names, step.variant)).then(
          () => null,
          (error: { code: string }) => error.code
        )
        addon.armFault!(null)
        const state = store.state
        const torn = new Set(state.state === 'torn' ? state.tensors : [])
        for (const name of step.names) {
          if (code === null) holds.set(name, step.variant)
          else if (code === 'WEIGHTS_TORN') holds.set(name, torn.has(name) ? 'torn' : step.variant)
        }
        const { tensors } = await store.checksums()
        const anyTorn = torn.size > 0
        const committed = step.end === 'commit' &&
          await update.commit({ version: `v${index}` }).then(() => true, () => false)
        if (committed) version = `v${index}`
        else await update.abort('so the program says')

        assert.deepEqual([...torn].sort(), names.filter(name => holds.get(name) === 'torn').sort())
        for (const { name, checksum } of tensors) {
          const what = holds.get(name)!
          if (what !== 'torn') assert.equal(checksum, sumOf(name, what), name)
        }
        assert.equal(committed, step.end === 'commit' && !anyTorn)
        assert.equal(store.weightVersion, version)
        assert.equal(gates.last!.torn !== null, anyTorn)
        assert.equal(gates.shutCount, gates.openCount)
      }
    }),
    { numRuns: 40 }
  )
})
