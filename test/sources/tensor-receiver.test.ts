import { mkdirSync, readdirSync, rmdirSync, symlinkSync, unlinkSync, writeFileSync } from 'node:fs'
import t from 'tap'
import type { Test } from 'tap'
import { native } from '../../src/native/load-addon.ts'
import { engineTensors } from '../../src/model/engine-names.ts'
import { buildModelTable } from '../../src/model/model-table.ts'
import { ARCHITECTURES } from '../../src/model/families.ts'
import type { ModelTable } from '../../src/model/architecture.ts'
import { TensorReceiver } from '../../src/sources/tensor/tensor-receiver.ts'
import type { TensorSource } from '../../src/sources/tensor/tensor.ts'
import { CoveredNames } from '../../src/weights/covered-names.ts'
import type { WeightStore } from '../../src/weights/weight-store.ts'
import { storeOf } from '../helpers/core.ts'
import { codedChecksum, codedTensor } from '../helpers/memory-source.ts'
import { recordedPickles } from '../helpers/pickles.ts'
import { sharedMemory, tensorEntry } from '../helpers/shared-tensors.ts'
import type { SharedMemory, SharedTensor } from '../helpers/shared-tensors.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'

const addon = native()
const openFiles = (): number => readdirSync('/proc/self/fd').length

function receiverOf (t: Test, ranks: number): TensorReceiver {
  const receiver = new TensorReceiver({ ranks })
  t.teardown(async () => {
    await receiver.close()
  })
  return receiver
}

function bytesOf (bits: Uint16Array): Uint8Array {
  return new Uint8Array(bits.buffer, bits.byteOffset, bits.byteLength)
}

/** The whole model, each tensor in a file of its own. */
function sharedModel (t: Test, table: ModelTable, variant: number): { tensors: SharedTensor[], files: SharedMemory[] } {
  const plans = [...table.tensors.values()].filter(plan => !plan.alternative)
  const files = plans.map(({ name, rows, cols }) => sharedMemory(t, bytesOf(codedTensor(variant, name, rows * cols))))
  return { tensors: plans.map(({ name, shape }, i) => ({ name, shape, memory: files[i]! })), files }
}

async function write (
  store: WeightStore,
  receiver: TensorReceiver,
  entries: string[],
  loadFormat: string | null = null
): Promise<void> {
  const source = await receiver.open({ entries, loadFormat })
  const update = await store.update()
  try {
    await update.write(source)
    await update.commit({ allowTorn: true })
  } catch (error) {
    await update.abort('failed')
    throw error
  } finally {
    await source.close()
  }
}

async function checkVariant (t: Test, store: WeightStore, table: ModelTable, variant: number): Promise<void> {
  for (const { name, checksum } of (await store.checksums()).tensors) {
    t.equal(checksum, codedChecksum(table, name, variant), name)
  }
}

for (const ranks of [1, 2, 4]) {
  t.test(`shared memory arrives bit for bit on ${ranks} ranks, and its references are released`, async t => {
    const { store, table, close } = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), ranks)
    t.teardown(close)
    const receiver = receiverOf(t, ranks)
    await receiver.discard([])
    const before = openFiles()
    for (const variant of [1, 2, 1]) {
      const { tensors, files } = sharedModel(t, table, variant)
      const senders = openFiles()
      await write(store, receiver, [tensorEntry(tensors)])
      await checkVariant(t, store, table, variant)
      t.ok(
        files.every(file => file.count() === 1 && file.exists()),
        "the reference of the request is gone, the sender's own is not"
      )
      t.equal(openFiles(), senders)
    }
    t.ok(before > 0)
    t.equal(receiver.counts.filesOpened, receiver.counts.filesClosed)
    t.equal(receiver.counts.handlesReleased, receiver.counts.filesOpened)
  })
}

t.test("ranks with an entry of their own read it; the others read another rank's", async t => {
  const { store, table, close } = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 2)
  t.teardown(close)
  const receiver = receiverOf(t, 2)
  const { tensors } = sharedModel(t, table, 1)
  const other = sharedModel(t, table, 2)
  const half = tensors.length >> 1
  // The second rank lacks the first half of the names, and the first rank the second half.
  await write(store, receiver, [tensorEntry(tensors.slice(0, half)), tensorEntry(tensors.slice(half))])
  await checkVariant(t, store, table, 1)
  // The ranks are sent different bytes, and each rank holds its own.
  await write(store, receiver, [tensorEntry(tensors), tensorEntry(other.tensors)])
  const param = table.params.findIndex(({ name }) => name === 'norm')
  const { rows } = table.params[param]!
  for (const rank of [0, 1]) {
    t.same(
      await addon.read(store.core, rank, param, 0, 0, rows, 1),
      bytesOf(codedTensor(rank + 1, 'model.norm.weight', rows))
    )
  }
})

t.test('a tensor in several matrices is cut at ranks and matrices, and is torn when one of them is', async t => {
  const { store, table, close } = storeOf(addon, tinyArchitecture('Qwen3MoeForCausalLM'), 2)
  t.teardown(close)
  const receiver = receiverOf(t, 2)
  await write(store, receiver, [tensorEntry(sharedModel(t, table, 1).tensors)])
  const name = 'model.layers.0.mlp.experts.gate_up_proj'
  const [experts, rows, cols] = table.tensors.get(name)!.shape as [number, number, number]
  // In memory it is [rows, experts, columns]: the rows of an expert are `experts` rows apart.
  const parts = (variant: number): Uint16Array => {
    const bits = new Uint16Array(experts * rows * cols)
    for (let e = 0; e < experts; e++) {
      const expert = `model.layers.0.mlp.experts.${e}.`
      for (let row = 0; row < rows; row++) {
        const from = codedTensor(variant, `${expert}${row < rows / 2 ? 'gate' : 'up'}_proj.weight`, rows / 2 * cols)
        const at = row % (rows / 2) * cols
        bits.set(from.subarray(at, at + cols), (row * experts + e) * cols)
      }
    }
    return bits
  }
  const permuted = (memory: SharedMemory): SharedTensor => ({
    name,
    memory,
    shape: [experts, rows, cols],
    stride: [cols, experts * cols, 1]
  })
  await write(store, receiver, [tensorEntry([permuted(sharedMemory(t, bytesOf(parts(2))))])])
  for (const { name, checksum } of (await store.checksums()).tensors) {
    const isNew = /^model\.layers\.0\.mlp\.experts\.\d+\.(gate|up)/.test(name)
    t.equal(checksum, codedChecksum(table, name, isNew ? 2 : 1), name)
  }
  // The file is truncated after it is opened: rows of the last experts are missing, but no expert's first row is.
  const cut = sharedMemory(t, bytesOf(parts(3)))
  const source = await receiver.open({ entries: [tensorEntry([permuted(cut)])], loadFormat: null })
  cut.truncate(64 + cut.bytes - 2 * cols)
  const update = await store.update()
  await t.rejects(update.write(source), { code: 'WEIGHTS_TORN', message: /file ended at byte/ })
  await update.abort('failed')
  await source.close()
  const { state } = store
  if (state.state !== 'torn') return t.fail('torn')
  t.same(state.tensors.filter(name => !/^model\.layers\.0\.mlp\.experts\.\d+\.(gate|up)_proj\.weight$/.test(name)), [])
  t.equal(state.tensors.length, 2 * experts, 'every checkpoint tensor in the fused tensor')
  t.equal(cut.count(), 1)
  await write(store, receiver, [tensorEntry([permuted(sharedMemory(t, bytesOf(parts(1))))])])
  t.equal(store.state.state, 'current')
  await checkVariant(t, store, table, 1)
})

t.test('load_format "direct" contains every parameter of every rank, and covers every name', async t => {
  for (const arch of ARCHITECTURES) {
    for (const ranks of [1, 2]) {
      const table = buildModelTable(tinyArchitecture(arch), ranks)
      const coverage = new CoveredNames(table)
      const plans = [...engineTensors(table).values()]
      t.equal(plans.length, table.params.length, 'a name each')
      const names = plans.flatMap(plan => coverage.names(plan))
      t.same(
        [...names].sort(),
        [...table.tensors.values()].filter(plan => !plan.alternative).map(plan => plan.name).sort()
      )
      for (const plan of plans) t.equal(plan.shape.reduce((a, b) => a * b, 1), plan.rows * plan.cols, plan.name)
    }
  }
})

t.test('all references of a refused payload are released, and nothing stays open', async t => {
  const receiver = receiverOf(t, 2)
  await receiver.discard([])
  const bits = bytesOf(codedTensor(1, 'x', 64))
  const before = openFiles()
  const tensor = (memory: Pick<SharedMemory, 'name' | 'bytes'>, fields: Partial<SharedTensor> = {}): SharedTensor => ({
    name: 'w',
    memory,
    shape: [4],
    ...fields
  })
  const refusals: Array<
    [what: string, code: string, references: number, entries: (memory: SharedMemory) => string[], loadFormat?: string]
  > = [
    ['expanded', 'TENSOR_PAYLOAD', 1, memory => [tensorEntry([tensor(memory, { shape: [8], stride: [0] })])]],
    ['overlapping', 'TENSOR_PAYLOAD', 1, memory => [tensorEntry([tensor(memory, { shape: [8, 8], stride: [1, 1] })])]],
    ['outside', 'TENSOR_PAYLOAD', 1, memory => [tensorEntry([tensor(memory, { shape: [65] })])]],
    ['dtype', 'TENSOR_PAYLOAD', 1, memory => [tensorEntry([tensor(memory, { dtype: 'int64' })])]],
    [
      'more than the file has',
      'TENSOR_PAYLOAD',
      2,
      memory => [tensorEntry([tensor(memory), tensor({ ...memory, bytes: 1 << 20 }, { name: 'v' })])]
    ],
    [
      'one byte more than the file has behind its header',
      'TENSOR_PAYLOAD',
      1,
      memory => [tensorEntry([tensor({ ...memory, bytes: memory.bytes + 1 })])]
    ],
    [
      'beside one that is gone',
      'TENSOR_PAYLOAD',
      1,
      memory => [tensorEntry([tensor(memory), tensor({ name: '/torch_1_1_1', bytes: 8 }, { name: 'gone' })])]
    ],
    ['not a bucket', 'TENSOR_PAYLOAD', 1, memory => [tensorEntry([tensor(memory)])], 'flattened_bucket'],
    ['one entry of shards', 'INVALID_REQUEST', 1, memory => [tensorEntry([tensor(memory)])], 'direct'],
    ['a broken entry beside it', 'PICKLE_MALFORMED', 1, memory => [tensorEntry([tensor(memory)]), 'gASV']],
    [
      'the same in three entries that differ',
      'PICKLE_MALFORMED',
      2,
      memory => [tensorEntry([tensor(memory)]), '', tensorEntry([tensor(memory, { name: 'v' })])]
    ]
  ]
  for (const [what, code, references, entries, loadFormat = null] of refusals) {
    const memory = sharedMemory(t, bits, 10)
    await t.rejects(receiver.open({ entries: entries(memory), loadFormat }), { code }, what)
    t.equal(memory.count(), 10 - references, what)
  }
  t.equal(openFiles(), before + refusals.length, 'those of the senders')
  t.equal(receiver.counts.filesOpened, receiver.counts.filesClosed)
})

t.test('the process that takes the last reference removes the file; a file without references stays', async t => {
  const receiver = receiverOf(t, 1)
  const bits = bytesOf(codedTensor(1, 'x', 4))
  for (const [count, left] of [[1, false], [2, true], [0, true], [-5, true]] as const) {
    const memory = sharedMemory(t, bits, count)
    const source = await receiver.open({
      entries: [tensorEntry([{ name: 'w', memory, shape: [4] }])],
      loadFormat: null
    })
    t.equal(memory.count(), count, 'held while it is open')
    await source.close()
    await source.close()
    t.equal(memory.exists(), left)
    t.equal(memory.count(), Math.min(count, Math.max(0, count - 1)), 'once, and never below 0')
  }
})

t.test('links, folders and short files with the right name are refused and left unchanged', async t => {
  const receiver = receiverOf(t, 1)
  const name = `/torch_${process.pid}_7_7`
  const path = `/dev/shm${name}`
  const entries = [tensorEntry([{ name: 'w', memory: { name, bytes: 8 }, shape: [4] }])]
  writeFileSync(`${path}.target`, Buffer.alloc(100, 1))
  for (
    const [make, remove] of [
      [() => {
        symlinkSync(`${path}.target`, path)
      }, () => {
        unlinkSync(path)
      }],
      [() => {
        mkdirSync(path)
      }, () => {
        rmdirSync(path)
      }],
      [() => {
        writeFileSync(path, 'short')
      }, () => {
        unlinkSync(path)
      }]
    ] as const
  ) {
    make()
    await t.rejects(receiver.open({ entries, loadFormat: null }), {
      code: 'TENSOR_PAYLOAD',
      message: /^tensor "w": shared memory \/torch_/
    })
    remove()
  }
  unlinkSync(`${path}.target`)
})

t.test('memory of GPUs and descriptors are refused with the reason', async t => {
  const receiver = receiverOf(t, 1)
  const payloads = recordedPickles('payloads').filter(({ any_dtype: any, ranks }) => !any && ranks === 1)
  for (
    const [kind, message] of [['cuda', /this engine is on the CPU: send tensors on the CPU/], [
      'descriptor',
      /set_sharing_strategy\("file_system"\)/
    ]] as const
  ) {
    const payload = payloads.find(({ expected }) =>
      expected.storages.length > 0 && expected.storages.every(storage => (storage as { kind: string }).kind === kind)
    )!
    await t.rejects(receiver.open({ entries: payload.entries, loadFormat: payload.load_format }), {
      code: 'UNSUPPORTED',
      message
    })
  }
  const gpu = new TensorReceiver({
    ranks: 1,
    visible: [{ ordinal: 99, uuid: 'GPU-00000000-0000-0000-0000-000000000001' }]
  })
  const payload = payloads.find(({ expected }) =>
    expected.storages.length > 0 && expected.storages.every(storage => (storage as { kind: string }).kind === 'cuda')
  )!
  await t.rejects(gpu.open({ entries: payload.entries, loadFormat: payload.load_format }), {
    code: 'TENSOR_PAYLOAD',
    message: /refit does not (see|count so far) \(it sees 99: GPU-0+-/
  })
  await gpu.close()
})

t.test('a slot of a CUDA counter goes down by one for each refused handle', async t => {
  const receiver = receiverOf(t, 1)
  const payload = recordedPickles('payloads').find(({ any_dtype: any, ranks, expected }) =>
    !any && ranks === 1 && expected.storages.length > 1 &&
    expected.storages.every(storage => (storage as { kind: string }).kind === 'cuda')
  )!
  const slots = Buffer.alloc(8 * 10_000)
  const storages = payload.expected.storages as Array<{ counterFile: string, counterSlot: number }>
  for (let slot = 0; slot < 10_000; slot++) slots.writeBigInt64LE(5n, slot * 8)
  const files = new Map(
    [...new Set(storages.map(({ counterFile }) => counterFile))].map(name => [
      name,
      Buffer.concat([Buffer.alloc(64), slots])
    ])
  )
  for (const [name, data] of files) writeFileSync(`/dev/shm${name}`, data)
  t.teardown(() => {
    for (const name of files.keys()) unlinkSync(`/dev/shm${name}`)
  })
  await t.rejects(receiver.open({ entries: payload.entries, loadFormat: payload.load_format }), { code: 'UNSUPPORTED' })
  const { readFileSync } = await import('node:fs')
  let taken = 0
  for (const name of files.keys()) {
    const data = readFileSync(`/dev/shm${name}`)
    for (let slot = 0; slot < 10_000; slot++) {
      const left = Number(data.readBigInt64LE(64 + slot * 8))
      const shares = storages.filter(storage => storage.counterFile === name && storage.counterSlot === slot).length
      if (left !== 5 - shares) t.fail(`slot ${slot}: ${left}`)
      taken += 5 - left
    }
  }
  t.equal(taken, storages.length)
})

for (const files of [1, 20]) {
  t.test(`the memory of a sender that has ended is found gone, ${files} files`, async t => {
    for (const nearBytes of [0, 1 << 20]) {
      const receiver = new TensorReceiver({ ranks: 1, nearBytes })
      const memories = Array.from({ length: files }, () => sharedMemory(t, bytesOf(codedTensor(1, 'x', 4))))
      const tensors = memories.map((memory, index) => ({ name: `w${index}`, memory, shape: [4] }))
      const source = await receiver.open({ entries: [tensorEntry(tensors)], loadFormat: null }) as TensorSource
      await source.look()
      memories.at(-1)!.unlink()
      await t.rejects(source.look(), {
        code: 'TENSOR_PAYLOAD',
        message: /the sender has ended: its shared memory .* gone/
      })
      await source.close()
      await receiver.close()
    }
  })
}

t.test('a receiver that closes releases all open handles, and accepts no more', async t => {
  const receiver = new TensorReceiver({ ranks: 1 })
  const memory = sharedMemory(t, bytesOf(codedTensor(1, 'x', 4)))
  const entries = [tensorEntry([{ name: 'w', memory, shape: [4] }])]
  const source = await receiver.open({ entries, loadFormat: null })
  await receiver.close()
  t.equal(memory.count(), 1)
  await t.rejects(source.verify(), { code: 'ENGINE_CLOSED' }, "its descriptors are closed, and may be another's by now")
  await source.close()
  await t.rejects(receiver.open({ entries, loadFormat: null }), { code: 'ENGINE_CLOSED' })
  t.equal(memory.count(), 1)
})
