import { setTimeout } from 'node:timers/promises'
import t from 'tap'
import { TENSOR_WRITTEN } from '../../src/native/write-layout.ts'
import type { GroupHandle } from '../../src/native/groups.ts'
import { faultyAddon } from '../helpers/core.ts'
import { codedJob, expectedParams } from './helpers/coded.ts'
import { plainModel, readAll } from './helpers/plain-core.ts'
import { FAULTY, runAlone } from './helpers/run-script.ts'

// gloo groups with all members in this process, each as another process would have it. test/interop/test_gloo.py tests
// them against torch's gloo.
const addon = faultyAddon()
const model = plainModel({ ranks: 2, hidden: 128 })
const MS = 60_000

async function connect (...members: number[][]): Promise<GroupHandle[]> {
  const size = members.flat().length
  const groups = members.map(ranks => addon.glooGroup({ size, ranks, host: '127.0.0.1' }))
  const peers = new Array<Uint8Array>(size)
  for (const [g, ranks] of members.entries()) {
    for (const [i, rank] of ranks.entries()) peers[rank] = groups[g]!.addresses[i]!
  }
  await Promise.all(groups.map(({ group }) => addon.glooConnect(group, peers, MS)))
  return groups.map(({ group }) => group)
}

async function end (groups: GroupHandle[], abort = false): Promise<void> {
  await Promise.all(groups.map(group => addon.endGroup(group, abort)))
}

t.test('received bytes are written out of their slot while the other slot receives', async t => {
  const core = addon.createCore(model.config)
  t.teardown(() => addon.closeCore(core))
  const [trainer, engine] = await connect([0], [1, 2])
  const { job, bytes } = codedJob(model.tensors)
  const source = job.sources[0] as { buffer: Uint8Array }
  await addon.stageGroup(engine!, bytes + 512, 2)
  await Promise.all([
    addon.groupSend(trainer!, source.buffer, MS),
    addon.groupReceive(engine!, 0, Float64Array.of(256, bytes), 0, MS)
  ])
  const staged = {
    ...job,
    sources: [{ staged: { group: engine!, slot: 0 as const } }],
    tensors: job.tensors.map((value, i) => i % 7 === 1 ? value + 256 : value)
  }
  t.strictSame(
    Buffer.from(await addon.groupRead(engine!, 0, 256 + 5, 64, MS)),
    Buffer.from(source.buffer.subarray(5, 69)),
    'and can be looked at'
  )
  const other = new Uint8Array(1000).fill(7)
  const [outcome] = await Promise.all([
    addon.write(core, staged),
    addon.groupSend(trainer!, other, MS),
    addon.groupReceive(engine!, 1, Float64Array.of(0, 1000), 0, MS)
  ])
  t.strictSame([outcome.error, outcome.bytes], [undefined, bytes])
  t.ok(outcome.states.every(state => state === TENSOR_WRITTEN))
  const again = addon.createCore(model.config)
  t.teardown(() => addon.closeCore(again))
  const before = await readAll(addon, again, model)
  t.strictSame(await readAll(addon, core, model), expectedParams(model, model.tensors, 'bfloat16', before))

  // The write holds its slot: the end of the group does not free the slot's memory during the write.
  const holding = addon.write(core, staged)
  await end([trainer!, engine!])
  t.equal((await holding).error, undefined)
})

t.test('a write to missing slots is refused', async t => {
  const core = addon.createCore(model.config)
  t.teardown(() => addon.closeCore(core))
  const [trainer, engine] = await connect([0], [1])
  const job = (group: number, slot: number): any => ({
    sources: [{ staged: { group, slot } }],
    tensors: Float64Array.of(0, 0, 0, 128, 1, 2, 2),
    rects: Float64Array.of(0, 0, 7, 0, 0, 128, 1, 0, 0)
  })
  t.throws(() => addon.write(core, job(engine!, 0)), {
    message: 'job.sources[0].staged: gloo group of 2 (here: rank 1) has nothing staged'
  })
  await addon.stageGroup(engine!, 255, 2)
  t.throws(() => addon.write(core, job(engine!, 0)), { message: /255/ }, 'it ends before the tensor does')
  t.throws(() => addon.write(core, job(engine!, 2)), { message: /job\.sources\[0\]\.staged\.slot/ })
  await end([trainer!, engine!])
  t.throws(() => addon.write(core, job(engine!, 0)), {
    message: `job.sources[0].staged: no group has handle ${engine!}: it was never made, or has ended`
  })
})

t.test('parameters are sent between cores of one layout, rank by rank, straight into place', async t => {
  const cores = [addon.createCore(model.config), addon.createCore(model.config)]
  t.teardown(() => {
    for (const core of cores) addon.closeCore(core)
  })
  await addon.scramble(cores[1]!, 5n)
  const expected = await readAll(addon, cores[1]!, model)
  for (const rank of [0, 1]) {
    const groups = await connect([0], [1])
    await Promise.all(groups.map((group, i) => addon.groupParams(group, cores[i]!, rank, 1, MS)))
    await end(groups)
  }
  t.strictSame(await readAll(addon, cores[0]!, model), expected)
  t.strictSame(await readAll(addon, cores[1]!, model), expected)
})

t.test('invalid arguments are refused before anything is sent', async t => {
  const [trainer, engine] = await connect([0], [1])
  await addon.stageGroup(engine!, 100, 2)
  const receive = (slot: any, parts: any, root: any, ms: any = MS) => () =>
    addon.groupReceive(engine!, slot, parts, root, ms)
  t.throws(receive(2, Float64Array.of(0, 1), 0), { message: /slot: expected/ })
  t.throws(receive(0, Float64Array.of(0), 0), { message: 'parts: expected a multiple of 2 entries, got 1' })
  t.throws(receive(0, Float64Array.of(0.5, 1), 0), { message: /parts\[0\]\.offset: expected an integer/ })
  t.throws(receive(0, [0, 1], 0), { message: /parts: expected/ })
  t.throws(receive(0, Float64Array.of(0, 1), -1), { message: /root: expected/ })
  t.throws(receive(0, Float64Array.of(0, 1), 0, -1), { message: /deadlineMs: expected/ })
  await t.rejects(receive(0, Float64Array.of(0, 101), 0)(), { message: /are not in a slot of 100/ })
  await t.rejects(receive(0, Float64Array.of(0, 1), 1)(), { message: 'root: rank 1 is of this process' })
  await t.rejects(receive(0, Float64Array.of(0, 1), 2)(), { message: 'root: expected a rank from 0 to 1, got 2' })
  await t.rejects(addon.groupRead(engine!, 0, 0, 101, MS), { message: 'bytes 0 to 101 are not in a slot of 100' })
  t.throws(() => addon.groupRead(engine!, 0, -1, 1, MS), { message: /offset: expected/ })
  t.throws(() => addon.groupRead(engine!, 0, 0, 2 ** 31, MS), { message: /bytes: expected/ })
  for (
    const [options, message] of [
      [{ size: 2, ranks: [], host: '127.0.0.1' }, /ranks: expected one or more distinct ranks from 0 to 1/],
      [{ size: 2, ranks: [2], host: '127.0.0.1' }, /ranks: expected/],
      [{ size: 0, ranks: [0], host: '127.0.0.1' }, /options\.size: expected/],
      [{ size: 2, ranks: [0], host: 'localhost' }, /host: expected an IPv4 or IPv6 address, got "localhost"/]
    ] as const
  ) t.throws(() => addon.glooGroup({ ...options, ranks: [...options.ranks] }), { message })
  t.throws(() => addon.glooGroup({ size: 2, ranks: [0], host: '192.0.2.1' }), {
    code: 'GROUP_REFUSED',
    message: /not an address of this machine/
  })
  t.throws(() => addon.groupBarrier(12345, 1), {
    message: 'no group has handle 12345: it was never made, or has ended'
  })
  // The refused calls have not broken the group.
  await Promise.all([addon.groupBarrier(trainer!, MS), addon.groupBarrier(engine!, MS)])
  await end([trainer!, engine!])
})

t.test('a late peer, an abort and an end have different error codes', async t => {
  const [trainer, engine] = await connect([0], [1])
  await t.rejects(addon.groupBarrier(engine!, 50), {
    code: 'GROUP_TIMEOUT',
    message: /^gloo group of 2 \(here: rank 1\): barrier: the deadline has passed; barrier 0 waited for rank 0 at .* s$/
  })
  await t.rejects(addon.groupBarrier(engine!, 50), {
    code: 'GROUP_BROKEN',
    message: /the group is unusable since: .*the deadline has passed/
  })
  await t.rejects(addon.groupBarrier(trainer!, MS), { code: 'GROUP_BROKEN', message: /rank 1 at / })
  await end([trainer!, engine!])
  const again = await connect([0], [1])
  const waiting = addon.groupBarrier(again[0]!, MS)
  const aborted = t.rejects(waiting, { code: 'GROUP_BROKEN', message: /it was ended: somebody asked for it/ })
  await setTimeout(10)
  addon.groupAbort(again[0]!, 'somebody asked for it')
  await aborted
  const pending = t.rejects(addon.groupBarrier(again[1]!, MS), { code: 'GROUP_BROKEN' })
  await end(again, true)
  await pending
  t.throws(() => addon.groupAbort(again[0]!, ''), { message: /no group has handle/ })
})

t.test('a process ends at once while its groups wait, also for memory of JavaScript', t => {
  const wait = `const addon = require(${JSON.stringify(FAULTY)})
    const peer = addon.glooGroup({ size: 2, ranks: [0], host: '127.0.0.1' })
    const own = addon.glooGroup({ size: 2, ranks: [1], host: '127.0.0.1' })
    const peers = [peer.addresses[0], own.addresses[0]]
    Promise.all([peer, own].map(({ group }) => addon.glooConnect(group, peers, 20000))).then(() => {
      addon.groupBarrier(peer.group, 3600000).catch(() => {})
      addon.groupSend(own.group, new Uint8Array(1000), 3600000).catch(() => {})
      setTimeout(() => { console.log('waits'); done() }, 50)
    })\n`
  for (const done of ['process.exit(3)', 'process.exitCode = 3; throw new Error("x")']) {
    const ran = runAlone(`${wait} function done () { ${done} }`)
    t.strictSame([ran.status, ran.signal, ran.stdout], [done.includes('throw') ? 1 : 3, null, 'waits\n'], done)
  }
  const worker = runAlone(`const { Worker } = require('node:worker_threads')
    const worker = new Worker(${
    JSON.stringify(wait + 'function done () { require("node:worker_threads").parentPort.postMessage(1) }')
  }, { eval: true })
    worker.on('message', () => worker.terminate().then(() => console.log('terminated')))`)
  t.strictSame([worker.status, worker.signal], [0, null], worker.stderr)
  t.match(worker.stdout, /terminated/)
  t.end()
})
