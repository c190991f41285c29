import { createRequire } from 'node:module'
import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { PART_FIELDS } from '../../src/native/groups.ts'
import type { NcclGroupOptions } from '../../src/native/groups.ts'
import { TENSOR, TENSOR_FIELDS } from '../../src/native/write-layout.ts'
import type { NativeAddon } from '../../src/native/addon.ts'
import { packageRoot } from '../../src/root.ts'
import { codedJob, expectedParams } from './helpers/coded.ts'
import { plainModel, readAll } from './helpers/plain-core.ts'
import type { PlainModel } from './helpers/plain-core.ts'
import { configSource, FAULTY, runAlone } from './helpers/run-script.ts'

// NCCL process groups without a GPU: the shipped code except CUDA's own calls, with a library that has NCCL's interface
// and threads as ranks (native/test/nccl_loop.cc). native/test/gpu/group/group_test.cc tests the rest.
// npm run test:native runs native/test/gpu/group/group_life.cc, the same without the addon, under the sanitizers.

const loop = join(packageRoot, 'build/stand-in/nccl_loop.so')
// Two engines of this process; one takes the trainer's place.
process.env.REFIT_CUDA_LIBRARY = join(packageRoot, 'build/stand-in/librefit_cuda.so')
const addon = createRequire(import.meta.url)(join(packageRoot, 'build/faults/refit.node')) as NativeAddon
const SECONDS = 60_000

interface Engine {
  core: number
  model: PlainModel
}

function engine (t: Test, ranks: number, gpus = Array.from({ length: ranks }, (_, gpu) => gpu)): Engine {
  const model = plainModel({ ranks })
  const core = addon.createCore({ ...model.config, device: 'cuda', gpus, shareGpus: true })
  t.teardown(() => {
    addon.closeCore(core)
  })
  return { core, model }
}

/** Groups of both: `from` is rank 0, `to` has the ranks behind. */
async function meet (
  t: Test,
  from: Engine,
  to: Engine,
  options: Partial<NcclGroupOptions> = {}
): Promise<[number, number]> {
  const size = options.coreRank === undefined ? from.model.config.ranks + to.model.config.ranks : 2
  const first = options.coreRank === undefined ? from.model.config.ranks : 1
  const groups: [number, number] = [
    addon.ncclGroup(from.core, { size, firstRank: 0, library: loop, ...options }),
    addon.ncclGroup(to.core, { size, firstRank: first, library: loop, ...options })
  ]
  t.teardown(async () => {
    await Promise.allSettled(groups.map(async group => {
      await addon.endGroup(group, true)
    }))
  })
  const id = addon.ncclUniqueId(loop)
  t.equal(id.length, 128)
  await Promise.all(groups.map(async group => {
    await addon.ncclConnect(group, id, SECONDS)
  }))
  return groups
}

t.test('pieces are received into alternating slots and written by every rank from its own', async t => {
  const sender = engine(t, 1, [0])
  const receiver = engine(t, 2, [0, 1])
  const [from, to] = await meet(t, sender, receiver, { warmUp: true })
  t.match(addon.ncclLibrary(to), /^2\.28\.9, .*loop\.so$/)
  const { job, bytes } = codedJob(receiver.model.tensors)
  const { buffer } = job.sources[0] as { buffer: Uint8Array }
  for (const group of [from, to]) await addon.stageGroup(group, bytes, 2)
  const before = await readAll(addon, receiver.core, receiver.model)
  for (const slot of [0, 1] as const) {
    await Promise.all([
      addon.groupSend(from, buffer, SECONDS),
      addon.groupReceive(to, slot, Float64Array.of(0, bytes), 0, SECONDS)
    ])
    t.same(Buffer.from(await addon.groupRead(to, slot, 3, 60, SECONDS)), Buffer.from(buffer.subarray(3, 63)))
    await addon.scramble(receiver.core, BigInt(slot + 1))
    const outcome = await addon.write(receiver.core, { ...job, sources: [{ staged: { group: to, slot } }] })
    t.equal(outcome.error, undefined)
    t.strictSame(
      await readAll(addon, receiver.core, receiver.model),
      expectedParams(receiver.model, receiver.model.tensors, 'bfloat16', before)
    )
  }
  await Promise.all([addon.groupBarrier(from, SECONDS), addon.groupBarrier(to, SECONDS)])
  // Parts outside of a slot, and a slot of another engine's group.
  const beyond = {
    ...job,
    sources: [{ staged: { group: to, slot: 0 as const } }],
    tensors: job.tensors.map((value, i) => i === 1 ? value + bytes : value)
  }
  t.throws(() => {
    void addon.write(receiver.core, beyond)
  }, /ends at byte/)
  t.throws(() => {
    void addon.write(sender.core, {
      sources: [{ staged: { group: to, slot: 0 } }],
      tensors: new Float64Array(),
      rects: new Float64Array()
    })
  }, /staged on the GPUs of 2 ranks, expected 1/)
  await addon.stageGroup(to, 0, 2)
  t.throws(() => {
    void addon.write(receiver.core, { ...job, sources: [{ staged: { group: to, slot: 0 } }] })
  }, /slot 0 has no room/)
  for (const group of [from, to]) await addon.endGroup(group, false)
  t.throws(() => addon.ncclLibrary(to), /no group has handle/)
})

t.test('broadcasts that match the layout of the weights are received straight into every rank', async t => {
  const sender = engine(t, 1, [0])
  const receiver = engine(t, 2, [0, 1])
  const [from, to] = await meet(t, sender, receiver)
  const { job, bytes } = codedJob(receiver.model.tensors)
  const { buffer } = job.sources[0] as { buffer: Uint8Array }
  const parts = Float64Array.from(
    receiver.model.tensors.flatMap(({ rows, cols }, tensor) => [
      job.tensors[tensor * TENSOR_FIELDS + TENSOR.offset]!,
      rows * cols * 2
    ])
  )
  const places = addon.groupPlaces(to, parts, job.tensors, job.rects)
  const found = receiver.model.tensors.filter((_, tensor) => places[tensor]! >= 0)
  t.same(found.map(({ name }) => name), ['ln1', 'ln2', 'norm'], 'tensors that both ranks have whole')
  await addon.stageGroup(from, bytes, 1)
  const before = await readAll(addon, receiver.core, receiver.model)
  const into = [...places.keys()].filter(part => places[part]! >= 0)
  const receiving = addon.groupReceiveInPlace(
    to,
    Float64Array.from(into.flatMap(part => [places[part]!, parts[part * PART_FIELDS + 1]!])),
    0,
    SECONDS
  )
  for (const part of into) {
    await addon.groupSend(
      from,
      buffer.subarray(parts[part * PART_FIELDS], parts[part * PART_FIELDS]! + parts[part * PART_FIELDS + 1]!),
      SECONDS
    )
  }
  await receiving
  t.strictSame(
    await readAll(addon, receiver.core, receiver.model),
    expectedParams(receiver.model, found, 'bfloat16', before)
  )
  // An invalid write, a missing place, and an unknown group.
  const beyond = job.tensors.map((value, i) => i === 1 ? value + bytes : value)
  t.throws(() => addon.groupPlaces(to, parts, beyond, job.rects), /ends at byte/)
  t.throws(() => addon.groupPlaces(to, parts.subarray(1), job.tensors, job.rects), /parts: expected a multiple of 2/)
  await t.rejects(addon.groupReceiveInPlace(to, Float64Array.of(0, 2 ** 40), 0, SECONDS), /are not all weights/)
  const { group: gloo } = addon.glooGroup({ size: 2, ranks: [1], host: '127.0.0.1' })
  t.teardown(async () => {
    await addon.endGroup(gloo, true)
  })
  t.throws(() => addon.groupPlaces(gloo, parts, job.tensors, job.rects), /expected a group of NCCL/)
  t.throws(() => {
    void addon.groupReceiveInPlace(gloo, parts, 0, SECONDS)
  }, /expected a group of NCCL/)
  await addon.release(receiver.core, 1, false)
  t.throws(() => addon.groupPlaces(to, parts, job.tensors, job.rects), /released/)
  await t.rejects(addon.groupReceiveInPlace(to, Float64Array.of(0, 2), 0, SECONDS), /released/)
})

t.test('parameters are sent from engine to engine, all ranks at once', async t => {
  const sender = engine(t, 2)
  const receiver = engine(t, 2)
  await addon.scramble(sender.core, 1n)
  await addon.scramble(receiver.core, 2n)
  const links = [await meet(t, sender, receiver, { coreRank: 0 }), await meet(t, sender, receiver, { coreRank: 1 })]
  await Promise.all([
    ...links.map(async ([from], rank) => {
      await addon.groupParams(from, sender.core, rank, 0, SECONDS)
    }),
    // A call with the peers in another order.
    ...links
      .map(async ([, to], rank) => {
        await addon.groupParams(to, receiver.core, rank, 0, SECONDS)
      })
      .reverse()
  ])
  const sent = await readAll(addon, sender.core, sender.model)
  t.strictSame(await readAll(addon, receiver.core, receiver.model), sent)
  t.notOk(sent[0]!.every(byte => byte === 0))
  await t.rejects(addon.groupParams(links[0]![0], receiver.core, 0, 0, SECONDS), /of another core/)
})

t.test('impossible groups are refused before anything is joined, and a missing peer ends the wait in time', async t => {
  const cpu = addon.createCore(plainModel().config)
  t.teardown(() => {
    addon.closeCore(cpu)
  })
  const options = { size: 3, firstRank: 1, library: loop }
  t.throws(() => addon.ncclGroup(cpu, options), { code: 'GROUP_REFUSED', message: /gloo/ })
  const shared = engine(t, 2, [1, 1])
  t.throws(() => addon.ncclGroup(shared.core, options), {
    code: 'GROUP_SHARED_GPU',
    message: /rank 1 and rank 0 share GPU-/
  })
  const { core } = engine(t, 2)
  t.throws(() => addon.ncclGroup(core, { ...options, size: 2 }), {
    code: 'GROUP_REFUSED',
    message: /do not fit into a group of 2/
  })
  t.throws(() => addon.ncclGroup(core, { ...options, library: '/nowhere.so' }), {
    code: 'GROUP_REFUSED',
    message: /\/nowhere\.so/
  })
  t.throws(() => addon.ncclGroup(core, { ...options, peerGpus: ['00000000-0000-0000-0000-000000000001'] }), {
    code: 'GROUP_SHARED_GPU',
    message: /trainer share/
  })
  t.throws(() => addon.ncclUniqueId('/nowhere.so'), { code: 'GROUP_REFUSED' })
  t.throws(() => addon.ncclGroup(core, { ...options, coreRank: 2 }), RangeError)
  const late = addon.ncclGroup(core, options)
  t.throws(() => {
    void addon.ncclConnect(late, new Uint8Array(127), 100)
  }, /expected 128 bytes, got 127/)
  await t.rejects(addon.groupBarrier(late, 100), /is not connected/)
  await t.rejects(addon.ncclConnect(late, addon.ncclUniqueId(loop), 100), {
    code: 'GROUP_TIMEOUT',
    message: /connecting/
  })
  await t.rejects(addon.groupBarrier(late, 100), { code: 'GROUP_BROKEN' })
  await addon.endGroup(late, true)
  // This call comes from another thread than the waiting one.
  const group = addon.ncclGroup(core, options)
  const connecting = addon.ncclConnect(group, addon.ncclUniqueId(loop), 60_000)
  addon.groupAbort(group, 'destroyed meanwhile')
  await t.rejects(connecting, { code: 'GROUP_BROKEN', message: /destroyed meanwhile/ })
  await addon.endGroup(group, false)
})

t.test('a failed write of a slot releases the slot, even if the write is not awaited', t => {
  // The thread that awaits it is ending the group, and waits until no write reads its slots.
  const { config } = plainModel()
  const ran = runAlone(`
    const { Worker } = require('node:worker_threads')
    const worker = new Worker(\`
      const addon = require(${JSON.stringify(FAULTY)})
      const config = ${configSource({ ...config, device: 'cuda', gpus: [0], shareGpus: true })}
      const library = ${JSON.stringify(loop)}
      const run = async () => {
        const core = addon.createCore(config)
        const group = addon.ncclGroup(core, { size: 1, firstRank: 0, library })
        await addon.ncclConnect(group, addon.ncclUniqueId(library), 10000)
        await addon.stageGroup(group, 128, 1)
        const tensors = Float64Array.of(0, 0, 0, 64, 1, 2, 2)
        const rects = Float64Array.of(0, 0, 7, 0, 0, 64, 1, 0, 0)
        const write = source => { addon.write(core, { sources: [source], tensors, rects }) }
        addon.armFault({ point: 'copy', at: 1, action: 'stall', stallMs: 1000 })
        write({ fd: require('node:fs').openSync('/dev/zero', 'r') })
        addon.release(core, 1, false)
        write({ staged: { group, slot: 0 } })
        process.exit(7)
      }
      run()\`, { eval: true })
    worker.on('exit', code => { console.log('the worker ended with', code) })
    setTimeout(() => { console.log('the worker does not end'); process.kill(process.pid, 'SIGKILL') }, 15000).unref()`)
  t.strictSame([ran.stdout, ran.signal, ran.status], ['the worker ended with 7\n', null, 0], ran.stderr)
  t.end()
})
