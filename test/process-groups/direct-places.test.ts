import t from 'tap'
import { nativeError } from '../helpers/fake-groups.ts'
import { joined } from '../helpers/joined-group.ts'
import type { WriteJob } from '../../src/native/write-job.ts'

const JOB: WriteJob = { sources: [], tensors: new Float64Array(), rects: new Float64Array() }

t.test('nccl: pieces that go straight into the weights need no slot, and the others are staged', async t => {
  const { fake, groups, announce } = await joined(t, 'nccl')
  // Pieces of one, two, two (one of the two has no place) and one broadcast.
  const stream = announce([200, 700, 10, 20, 256, 1100], 800)
  fake.placeOf = begin => begin === 1536 || begin === 1792 ? -1 : 7000 + begin
  fake.send(6)
  await stream.ready()
  await fake.shut(async () => {
    stream.prepare(JOB, {})
    t.notOk(stream.touched)
    const sources: unknown[] = []
    for (let piece = await stream.next(); piece !== undefined; piece = await stream.next()) sources.push(piece.source)
    t.match(sources, [null, null, { staged: { slot: 0 } }, { staged: { slot: 1 } }])
    t.ok(stream.touched)
  })
  t.same(fake.received, [
    { slot: null, parts: [[7000, 200]], gate: true },
    { slot: null, parts: [[7256, 700], [8024, 10]], gate: true },
    { slot: 0, parts: [[0, 20], [256, 256]], gate: true },
    { slot: 1, parts: [[0, 1100]], gate: true }
  ])
  t.same(fake.staged, [[2 ** 20, 2]])
  t.match(groups.counts, { bytesReceived: 200 + 700 + 10 + 20 + 256 + 1100, bytesDropped: 0 })
  await stream.close()
})

t.test('nccl: direct pieces are not staged, and refused ones are received into slots', async t => {
  const { fake, groups, announce } = await joined(t, 'nccl')
  fake.placeOf = begin => begin
  const taken = announce([100, 200], 50)
  fake.send(2)
  await fake.shut(async () => {
    taken.prepare(JOB, {})
    for (let piece = await taken.next(); piece !== undefined;) piece = await taken.next()
  })
  await taken.close()
  t.same(fake.log, ['places', 'connect', 'in place', 'in place'])
  // The first piece cannot be written while the second is being received, so the third is not received directly.
  const broken = announce([100, 200, 300], 50)
  fake.placeOf = begin => begin === 0 ? -1 : begin
  await fake.shut(async () => {
    broken.prepare(JOB, {})
    fake.send(1)
    t.match(await broken.next(), { source: { staged: { slot: 0 } } })
    fake.send(2)
    await broken.drop(false)
  })
  t.ok(broken.touched, 'the second was on its way into the weights')
  t.same(fake.received.slice(2).map(({ slot }) => slot), [0, null, 0])
  t.match(groups.counts, { bytesReceived: 900, bytesDropped: 500 })
  await broken.close()
  const unwanted = announce([100], 50)
  fake.send(1)
  await unwanted.close()
  t.equal(fake.received.at(-1)!.slot, 0)
  t.notOk(unwanted.touched)
})

t.test('nccl: the places of a repeated plan are looked up once, and again if its tensors lie elsewhere', async t => {
  const { fake, announce } = await joined(t, 'nccl')
  fake.placeOf = begin => 7000 + begin
  const place = async (sizes: number[], tensors: number): Promise<unknown> => {
    const stream = announce(sizes, 5)
    fake.log.length = fake.received.length = 0
    fake.send(sizes.length)
    await stream.ready()
    await fake.shut(async () => {
      stream.prepare({ ...JOB, tensors: Float64Array.of(tensors) }, {})
      while (await stream.next() !== undefined) { /* to its end */ }
    })
    await stream.close()
    return [fake.log.filter(what => what === 'places').length, fake.received.flatMap(({ parts }) => parts)]
  }
  t.same(await place([200, 300], 1), [1, [[7000, 200], [7256, 300]]])
  t.same(await place([200, 300], 1), [0, [[7000, 200], [7256, 300]]])
  t.same(await place([300, 200], 1), [1, [[7000, 300], [7512, 200]]])
  t.same(await place([300, 200], 2), [1, [[7000, 300], [7512, 200]]])
})

t.test('nccl: pieces that go straight into the weights are received in longer runs', async t => {
  const { fake, announce } = await joined(t, 'nccl')
  fake.placeOf = begin => begin
  const mib = 2 ** 20
  const sizes = [4000 * mib, 96 * mib, 1, 4096 * mib, 4097 * mib, 1]
  const stream = announce(sizes, 50, 4096 * mib)
  fake.send(sizes.length)
  const found: Array<[begin: number, length: number]> = []
  await fake.shut(async () => {
    stream.prepare(JOB, {})
    for (let piece = await stream.next(); piece !== undefined; piece = await stream.next()) {
      found.push([
        piece.begin,
        piece.length
      ])
    }
  })
  t.same(fake.received.map(({ parts }) => parts.map(([, bytes]) => bytes)), [
    [4000 * mib, 96 * mib],
    [1],
    [4096 * mib],
    [4097 * mib],
    [1]
  ])
  t.equal(found.length, 5)
  for (const [index, [begin, length]] of found.entries()) t.equal(begin + length, found[index + 1]?.[0] ?? begin + 256)
  await stream.close()
})

t.test('nccl: a broadcast straight into the weights counts as touching them once it has begun', async t => {
  const { fake, announce } = await joined(t, 'nccl')
  fake.placeOf = begin => begin
  const stream = announce([100], 50)
  await fake.shut(async () => {
    stream.prepare(JOB, {})
    fake.fault = nativeError('GROUP_BROKEN', 'rank 0 ended')
    await t.rejects(stream.next(), { code: 'GROUP_BROKEN' })
  })
  t.ok(stream.touched)
  const { fake: other, group, announce: announceOther } = await joined(t, 'nccl')
  other.placeOf = begin => begin
  const early = announceOther([100], 50)
  await other.shut(async () => {
    early.prepare(JOB, {})
    group.abandon('it is enough')
    await t.rejects(early.next(), { code: 'GROUP_BROKEN' })
  })
  t.notOk(early.touched)
})

t.test('over gloo, and with --staged-broadcasts, every broadcast is staged', async t => {
  for (const [backend, staged] of [['gloo', false], ['nccl', true]] as const) {
    const { fake, announce } = await joined(t, backend, { staged })
    fake.placeOf = begin => begin
    const stream = announce([100, 200], 50)
    fake.send(2)
    await stream.ready()
    await fake.shut(async () => {
      stream.prepare(JOB, {})
      for (let piece = await stream.next(); piece !== undefined;) piece = await stream.next()
    })
    await stream.close()
    t.same(fake.received.map(({ slot }) => slot), [0, 1])
    t.notOk(fake.log.includes('places'))
  }
})

t.test('nccl: into a second set of weights, only connecting and allocating need the gate', async t => {
  const { fake, announce } = await joined(t, 'nccl')
  fake.besideSteps = true
  fake.placeOf = begin => begin === 0 ? 7000 : -1
  const take = async (sizes: number[]): Promise<void> => {
    const stream = announce(sizes, 800)
    fake.send(sizes.length)
    await stream.ready()
    stream.prepare(JOB, { set: 1, beside: true })
    while (await stream.next() !== undefined);
    await stream.close()
    t.equal(stream.dropped, undefined)
  }
  await take([200, 700])
  t.same(fake.log, ['places', 'connect', 'in place', 'stage', 'begin', 'receive'])
  t.same(fake.sets, [1])
  t.ok(fake.received.every(({ gate }) => !gate))
  const { shuts } = fake
  t.equal(shuts, 2, 'for the connection, and for the slots')
  await take([200, 600])
  await take([100])
  t.equal(fake.shuts, shuts, 'everything is there')
  t.same(fake.sets, [1, 1, 1])
  await take([200, 3 * 2 ** 20])
  t.equal(fake.shuts, shuts + 1, 'a larger slot')
})

t.test('nccl: an update of a second set that breaks off drops the rest with the gate open', async t => {
  const { fake, announce, groups } = await joined(t, 'nccl')
  fake.besideSteps = true
  const stream = announce([200, 700, 300], 800)
  fake.send(3)
  await stream.ready()
  stream.prepare(JOB, { set: 1, beside: true })
  await stream.next()
  const { shuts } = fake
  await stream.drop(false)
  await stream.close()
  t.match(stream.dropped, /received and dropped/)
  t.equal(fake.shuts, shuts)
  t.equal(groups.counts.bytesReceived, 1200)
})
