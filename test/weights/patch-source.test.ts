import t from 'tap'
import assert from 'node:assert/strict'
import fc from 'fast-check'
import { POSITIONS } from '../../src/native/deltas.ts'
import { DTYPES } from '../../src/native/dtypes.ts'
import type { ElementPatch } from '../../src/native/deltas.ts'
import type { RefitError } from '../../src/errors.ts'
import type { ModelTable } from '../../src/model/architecture.ts'
import { missingNames } from '../../src/weights/plan.ts'
import type { PatchSource, WeightSource, WriteReport } from '../../src/contract/weight-source.ts'
import type { WeightStore } from '../../src/weights/weight-store.ts'
import { faultyAddon, storeOf } from '../helpers/core.ts'
import { sparseSource } from '../../src/sources/tensor/sparse-delta.ts'
import { TENSOR } from '../../src/sources/tensor/tensor.ts'
import type { SparseItem } from '../../src/wire/trainers/sparse-payload.ts'
import { codedChecksum, codedTensor, memorySource } from '../helpers/memory-source.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'

// Changes of elements over a real core: the current values are read, changed and written back, in every layout.

const addon = faultyAddon()

async function apply (store: WeightStore, source: WeightSource): Promise<WriteReport> {
  const update = await store.update()
  try {
    const report = await update.write(source)
    await update.commit({ allowTorn: true })
    return report
  } catch (error) {
    await update.abort('failed')
    throw error
  }
}

/** The elements of tensors that a rule picks, with a variant's values (`from`: as XOR with another variant's bits). */
function patchOf (
  table: ModelTable,
  names: readonly string[],
  variant: number,
  picks: (index: number) => boolean = () => true,
  from?: number
): PatchSource {
  const tensors = new Map<string, ElementPatch[]>()
  let bytes = 0
  for (const name of names) {
    const { rows, cols } = table.tensors.get(name)!
    const wanted = codedTensor(variant, name, rows * cols)
    // Unsorted: from both ends.
    const at = Array.from(wanted.keys()).filter(picks).sort((a, b) => (a % 7) - (b % 7) || b - a)
    const base = from === undefined ? undefined : codedTensor(from, name, rows * cols)
    const values = Uint16Array.from(at, index => wanted[index]! ^ (base?.[index] ?? 0))
    tensors.set(name, [{
      encoding: POSITIONS.int32,
      positions: new Uint8Array(Int32Array.from(at).buffer),
      first: 0,
      values: new Uint8Array(values.buffer),
      dtype: DTYPES.bfloat16,
      xor: from !== undefined
    }])
    bytes += at.length * 6
  }
  const announced = names.map(name => ({
    name,
    dtype: 'bfloat16' as const,
    shape: table.tensors.get(name)!.shape,
    source: 0,
    offset: 0
  }))
  return {
    kind: 'patch',
    transport: TENSOR,
    tensors: announced,
    patch: { tensors, bytes },
    verify: async () => {},
    close: async () => {}
  }
}

async function holds (store: WeightStore, table: ModelTable, variantOf: (name: string) => number): Promise<void> {
  const { tensors } = await store.checksums()
  // Stored bits: a float32 has the bits of the bfloat16 and 16 zeros.
  const stored = (checksum: string): string => store.dtype === 'bfloat16' ? checksum : `${checksum.slice(4)}0000`
  assert.deepEqual(
    tensors,
    tensors.map(({ name }) => ({ name, checksum: stored(codedChecksum(table, name, variantOf(name))) }))
  )
}

for (const architecture of ['Qwen2ForCausalLM', 'Qwen3MoeForCausalLM'] as const) {
  for (const ranks of [1, 2]) {
    for (const [dtype, shadow] of [['bfloat16', false], ['float32', false], ['bfloat16', true]] as const) {
      const sets = shadow ? ' with two sets' : ''
      t.test(`${architecture} on ${ranks} ranks in ${dtype}${sets}: deltas turn one variant into another`, async t => {
        // Pieces with some rows, and with several tensors.
        const { store, table, close, gates } = storeOf(addon, tinyArchitecture(architecture), ranks, dtype, {
          patchBytes: 2500,
          shadow
        })
        t.teardown(close)
        const names = missingNames(table, new Set())
        await fc.assert(
          fc.asyncProperty(
            fc.integer({ min: 1, max: 40 }),
            fc.integer({ min: 0, max: 6 }),
            fc.boolean(),
            async (step, rest, isXor) => {
              await apply(store, memorySource(table, names, 1))
              const some = names.filter((_, index) => index % 7 !== rest)
              const isFirst = (index: number): boolean => index % (step + 1) === 0
              // An engine with another dtype has other bits than the sender.
              const from = isXor && dtype === 'bfloat16' ? 1 : undefined
              const first = await apply(store, patchOf(table, some, 2, isFirst, from))
              const second = await apply(store, patchOf(table, some, 2, index => !isFirst(index), from))
              await holds(store, table, name => some.includes(name) ? 2 : 1)
              const differing = some.reduce((sum, name) => {
                const before = codedTensor(1, name, sizeOf(table, name))
                const after = codedTensor(2, name, sizeOf(table, name))
                return sum + after.filter((bits, index) => bits !== before[index]).length
              }, 0)
              assert.equal(first.changed! + second.changed!, differing)
              assert.equal(first.tensors, some.length)
              assert.equal((await apply(store, patchOf(table, some, 2))).changed, 0, 'a second time changes nothing')
            }
          ),
          { numRuns: 4 }
        )
        t.equal(store.state.state, 'current')
        t.equal(gates.shutCount, gates.openCount)
      })
    }
  }
}

t.test('an invalid patch is refused before the gate shuts', async t => {
  const { store, table, close, gates } = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 2)
  t.teardown(close)
  const names = missingNames(table, new Set())
  await apply(store, memorySource(table, names, 1))
  const shut = gates.shutCount
  const epoch = store.epoch
  const good = patchOf(table, ['model.norm.weight'], 2)
  const changed = (change: (patch: ElementPatch) => Partial<ElementPatch>): PatchSource => ({
    ...good,
    patch: {
      bytes: 0,
      tensors: new Map([...good.patch.tensors]
        .map(([name, patches]) => [
          name,
          patches.map(patch => ({ ...patch, ...change(patch) }))
        ]))
    }
  })
  const cases: Array<[string, WeightSource, RegExp]> = [
    [
      'TENSOR_PAYLOAD',
      changed(({ positions }) => ({ positions: positions.map((byte, index) => index < 4 ? 0xff : byte) })),
      /position -1 lies outside of its \d+ elements\. Nothing has changed/
    ],
    [
      'TENSOR_PAYLOAD',
      changed(({ positions }) => ({
        positions: Uint8Array.from([...positions.subarray(0, 4), ...positions.subarray(0, positions.length - 4)])
      })),
      /comes twice/
    ],
    ['TENSOR_PAYLOAD', changed(({ positions }) => ({ positions: positions.subarray(4) })), /bytes of positions for/],
    [
      'TENSOR_PAYLOAD',
      changed(() => ({ encoding: POSITIONS.range, positions: new Uint8Array(0), first: 1 })),
      /lies outside/
    ],
    ['WEIGHTS_MISMATCH', { ...good, tensors: good.tensors.map(tensor => ({ ...tensor, shape: [3] })) }, /shape \[3\]/],
    [
      'WEIGHTS_UNKNOWN_NAME',
      { ...good, tensors: good.tensors.map(tensor => ({ ...tensor, name: 'model.nobody' })) },
      /model\.nobody/
    ],
    ['WEIGHTS_MISMATCH', { ...good, tensors: [...good.tensors, ...good.tensors] }, /send each weight once/]
  ]
  for (const [code, source, message] of cases) await t.rejects(apply(store, source), { code, message })
  t.equal(gates.shutCount, shut, 'the gate was not shut for it')
  t.equal(store.epoch, epoch)
  await holds(store, table, () => 1)
})

t.test("bits of another dtype than the engine's are refused, also if it has the same width", async t => {
  const name = 'model.norm.weight'
  for (const [held, sent] of [['float32', 'bfloat16'], ['bfloat16', 'float16'], ['bfloat16', 'float32']] as const) {
    const { store, table, close } = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 1, held)
    t.teardown(close)
    await apply(store, memorySource(table, missingNames(table, new Set()), 1))
    const patch = patchOf(table, [name], 2, undefined, 1)
    const [own] = patch.patch.tensors.get(name)!
    const values = new Uint8Array(own!.values.length * (sent === 'float32' ? 2 : 1))
    const tensors = new Map([[name, [{ ...own!, values, dtype: DTYPES[sent] }]]])
    await t.rejects(apply(store, { ...patch, patch: { tensors, bytes: 0 } }), {
      code: 'TENSOR_PAYLOAD',
      message: /another dtype/
    }, `${sent} into ${held}`)
    await holds(store, table, () => 1)
  }
})

t.test('a delta of other weights than those that are held is refused, and one of the held weights fits', async t => {
  const { store, table, close, gates } = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 2)
  t.teardown(close)
  const names = missingNames(table, new Set())
  await apply(store, memorySource(table, names, 1))
  const items = names.map((name): SparseItem => {
    const from = codedTensor(1, name, sizeOf(table, name))
    const values = codedTensor(2, name, sizeOf(table, name)).map((bits, index) => bits ^ from[index]!)
    return {
      name,
      dtype: 'bfloat16',
      shape: table.tensors.get(name)!.shape,
      operation: 'xor',
      encoding: 'range',
      positions: new Uint8Array(0),
      first: 0,
      values: new Uint8Array(values.buffer)
    }
  })
  const relativeTo = (epoch: number): PatchSource => sparseSource(items, epoch)
  const base = store.epoch
  // Another client writes between the sender's base and its delta.
  await apply(store, memorySource(table, names.slice(0, 1), 3))
  const shut = gates.shutCount
  await t.rejects(apply(store, relativeTo(base)), { code: 'CONFLICT', message: /another update has written weights/ })
  await t.rejects(apply(store, relativeTo(store.epoch + 1)), { code: 'CONFLICT' })
  t.equal(gates.shutCount, shut)
  await holds(store, table, name => name === names[0] ? 3 : 1)
  await apply(store, memorySource(table, names, 1))
  await apply(store, relativeTo(store.epoch))
  await holds(store, table, () => 2)
})

t.test('a write that breaks off tears its tensors; deltas of them are refused, whole tensors heal them', async t => {
  const { store, table, close } = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 2)
  t.teardown(close)
  t.teardown(() => {
    addon.armFault!(null)
  })
  const names = missingNames(table, new Set())
  await apply(store, memorySource(table, names, 1))
  addon.armFault!({ point: 'copy', at: 5, action: 'fail' })
  await t.rejects(apply(store, patchOf(table, names, 2)), { code: 'WEIGHTS_TORN', message: /Torn: model\./ })
  addon.armFault!(null)
  const { state } = store
  const torn = state.state === 'torn' ? state.tensors : []
  t.ok(torn.length > 0, 'at least what was cut off; all that came with it, as pieces are written whole')
  const error = await apply(store, patchOf(table, names, 2)).then(() => null, (error: RefitError) => error)
  t.match(error, { code: 'CONFLICT', message: /is torn, and a delta changes existing values: send it whole first/ })
  t.ok(torn.includes(error!.param!))
  const sound = names.filter(name => !torn.includes(name))
  await apply(store, patchOf(table, sound, 3))
  await apply(store, memorySource(table, torn, 1))
  await holds(store, table, name => torn.includes(name) ? 1 : 3)
  t.equal(store.state.state, 'current')
})

function sizeOf (table: ModelTable, name: string): number {
  const { rows, cols } = table.tensors.get(name)!
  return rows * cols
}
