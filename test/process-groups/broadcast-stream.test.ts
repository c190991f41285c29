import t from 'tap'
import type { Test } from 'tap'
import { setImmediate as turn } from 'node:timers/promises'
import { eventually, failureOf } from '../helpers/eventually.ts'
import { FakeGroups, nativeError } from '../helpers/fake-groups.ts'
import { layOutPieces } from '../../src/process-groups/pieces.ts'
import type { WriteJob } from '../../src/native/write-job.ts'
import { WeightGroups } from '../../src/process-groups/weight-groups.ts'
import type { WeightGroup } from '../../src/process-groups/weight-group.ts'
import { masterPolicy } from '../../src/rendezvous/master-policy.ts'
import { StoreServer } from '../../src/rendezvous/server.ts'

interface Joined {
  fake: FakeGroups
  groups: WeightGroups
  group: WeightGroup
  server: StoreServer
  announce: (sizes: number[], pieceBytes?: number, runBytes?: number) => ReturnType<WeightGroup['announce']>
}

async function joined (t: Test, backend: 'nccl' | 'gloo', timeoutMs = 60_000, staged = false): Promise<Joined> {
  const fake = new FakeGroups({ isNccl: backend === 'nccl' })
  const server = await StoreServer.listen({ host: '127.0.0.1', port: 0 })
  const groups = new WeightGroups({ host: fake.host, policy: masterPolicy(), timeoutMs, staged })
  t.teardown(async () => {
    await groups.close(100)
    await server.close()
  })
  await groups.init({
    name: 'g',
    backend,
    address: '127.0.0.1',
    port: server.address.port,
    rankOffset: 1,
    worldSize: 3,
    barrier: false
  })
  t.equal(server.workers, 2, 'both ranks are counted')
  const store = await server.connect()
  if (backend === 'gloo') await store.set('g/g//cpu//0/0', 'rank 0')
  else await store.set('g/g//cuda//0', Buffer.alloc(128, 1))
  store.close()
  const group = groups.get('g')
  return {
    fake,
    groups,
    group,
    server,
    announce: (sizes, pieceBytes = 1000, runBytes) =>
      group.announce(
        layOutPieces(sizes, pieceBytes).pieces,
        ({ first, end }) => `tensors ${first} to ${end - 1}`,
        runBytes
      )
  }
}

t.test('gloo: the first piece comes before the gate is asked for, and the next while one is written', async t => {
  const { fake, announce } = await joined(t, 'gloo')
  const receipt = announce([600, 600, 600])
  fake.send(1)
  await receipt.ready()
  t.same(fake.received, [{ slot: 0, parts: [[0, 600]], gate: false }])
  const first = await receipt.next()
  t.match(first, { begin: 0, length: 768, source: { staged: { slot: 0 } } })
  fake.send(1)
  while (fake.received.length < 2) await new Promise(setImmediate)
  t.equal(fake.received[1]!.slot, 1, 'the other slot, before anybody asked')
  t.match(await receipt.next(), { begin: 768, source: { staged: { slot: 1 } } })
  fake.send(1)
  t.match(await receipt.next(), { begin: 1536, source: { staged: { slot: 0 } } })
  t.equal(await receipt.next(), undefined)
  await receipt.close()
  t.equal(receipt.dropped, undefined)
  t.equal(fake.shuts, 0)
})

t.test('a bucket as large as the model has one slot, requests of several pieces and small ones have two', async t => {
  const { fake, group, announce } = await joined(t, 'gloo')
  const GB = 2 ** 30
  const take = async (sizes: number[], pieceBytes: number): Promise<void> => {
    const receipt = announce(sizes, pieceBytes)
    fake.send(sizes.length)
    await receipt.ready()
    for (let piece = await receipt.next(); piece !== undefined;) piece = await receipt.next()
    await receipt.close()
  }
  await take([100], GB)
  await take([2 ** 21, 2 ** 21], 2 ** 21)
  await take([16 * GB], 16 * GB)
  await take([16 * GB - 5], 16 * GB)
  await take([2 * GB, 2 * GB, 7], 2 * GB)
  await take([5, 5], 5)
  await take([3 * GB], 3 * GB)
  t.same(fake.staged, [[2 ** 20, 2], [2 ** 21, 2], [16 * GB, 1], [2 * GB, 2], [3 * GB, 1]])
  t.equal(group.state, 'connected')
})

t.test('nccl: nothing that wants the gate is called before it is shut', async t => {
  const { fake, announce } = await joined(t, 'nccl')
  const receipt = announce([10, 20], 5)
  fake.send(2)
  await receipt.ready()
  t.same(fake.log, [])
  await fake.shut(async () => {
    await receipt.next()
    await receipt.next()
    t.equal(await receipt.next(), undefined)
  })
  t.same(fake.log, ['connect', 'stage', 'begin', 'begin', 'receive', 'receive'])
  await receipt.close()
})

t.test('nccl: a piece is begun before the one before it is waited for, once its slot is free', async t => {
  const { fake, announce } = await joined(t, 'nccl')
  const receipt = announce([10, 20, 30, 40], 5)
  await receipt.ready()
  await fake.shut(async () => {
    for (let piece = 0; piece < 4; piece++) {
      fake.log.length = 0
      const coming = receipt.next()
      await turn()
      t.same(
        fake.log,
        [['connect', 'stage', 'begin', 'begin', 'receive'], ['begin', 'receive'], ['begin', 'receive'], [
          'receive'
        ]][piece],
        `of piece ${piece}`
      )
      fake.send()
      t.match(await coming, { source: { staged: { slot: piece % 2 } } })
    }
    t.equal(await receipt.next(), undefined)
  })
  t.same(fake.received.map(({ slot }) => slot), [0, 1, 0, 1])
  await receipt.close()
})

t.test('nccl: pieces that were begun ahead are waited for when they are dropped, and after a failure', async t => {
  const { fake, groups, announce } = await joined(t, 'nccl')
  const dropped = announce([10, 20, 30], 5)
  fake.send()
  await dropped.ready()
  await fake.shut(async () => {
    await dropped.next()
    const ending = dropped.drop(false)
    fake.send(2)
    await ending
  })
  t.match(groups.counts, { bytesReceived: 60, bytesDropped: 50 })
  t.match(dropped, {
    hasEnded: true,
    dropped: 'What was announced has been received and dropped, and the group stays in step'
  })
  const failing = announce([10, 20, 30], 5)
  await failing.ready()
  await fake.shut(async () => {
    const coming = failing.next()
    await turn()
    fake.fault = nativeError('GROUP_BROKEN', 'the peer has gone')
    fake.send(0)
    await t.rejects(coming, { code: 'GROUP_BROKEN', message: /the peer has gone/ })
    await failing.drop(false)
  })
  t.equal(fake.begun, 0)
  await failing.close()
})

const JOB: WriteJob = { sources: [], tensors: new Float64Array(), rects: new Float64Array() }

t.test('nccl: what goes straight into the weights needs no slot, and the rest has room for its own', async t => {
  const { fake, groups, announce } = await joined(t, 'nccl')
  // Pieces of one, two, two (one of which has no place) and one broadcast.
  const receipt = announce([200, 700, 10, 20, 256, 1100], 800)
  fake.placeOf = begin => begin === 1536 || begin === 1792 ? -1 : 7000 + begin
  fake.send(6)
  await receipt.ready()
  await fake.shut(async () => {
    receipt.prepare(JOB)
    t.notOk(receipt.touched)
    const sources: unknown[] = []
    for (let piece = await receipt.next(); piece !== undefined; piece = await receipt.next()) sources.push(piece.source)
    t.match(sources, [null, null, { staged: { slot: 0 } }, { staged: { slot: 1 } }])
    t.ok(receipt.touched)
  })
  t.same(fake.received, [
    { slot: null, parts: [[7000, 200]], gate: true },
    { slot: null, parts: [[7256, 700], [8024, 10]], gate: true },
    { slot: 0, parts: [[0, 20], [256, 256]], gate: true },
    { slot: 1, parts: [[0, 1100]], gate: true }
  ])
  t.same(fake.staged, [[2 ** 20, 2]])
  t.match(groups.counts, { bytesReceived: 200 + 700 + 10 + 20 + 256 + 1100, bytesDropped: 0 })
  await receipt.close()
})

t.test('nccl: where all goes straight into the weights nothing is staged, and what is refused is received into slots', async t => {
  const { fake, groups, announce } = await joined(t, 'nccl')
  fake.placeOf = begin => begin
  const taken = announce([100, 200], 50)
  fake.send(2)
  await fake.shut(async () => {
    taken.prepare(JOB)
    for (let piece = await taken.next(); piece !== undefined;) piece = await taken.next()
  })
  await taken.close()
  t.same(fake.log, ['places', 'connect', 'in place', 'in place'])
  // The second is under way when the first cannot be written: the third is nobody's.
  const broken = announce([100, 200, 300], 50)
  fake.placeOf = begin => begin === 0 ? -1 : begin
  await fake.shut(async () => {
    broken.prepare(JOB)
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

t.test('nccl: where broadcasts go is asked once for a plan that comes again, and anew where its tensors lie elsewhere', async t => {
  const { fake, announce } = await joined(t, 'nccl')
  fake.placeOf = begin => 7000 + begin
  const place = async (sizes: number[], tensors: number): Promise<unknown> => {
    const receipt = announce(sizes, 5)
    fake.log.length = fake.received.length = 0
    fake.send(sizes.length)
    await receipt.ready()
    await fake.shut(async () => {
      receipt.prepare({ ...JOB, tensors: Float64Array.of(tensors) })
      while (await receipt.next() !== undefined) { /* to its end */ }
    })
    await receipt.close()
    return [fake.log.filter(what => what === 'places').length, fake.received.flatMap(({ parts }) => parts)]
  }
  t.same(await place([200, 300], 1), [1, [[7000, 200], [7256, 300]]])
  t.same(await place([200, 300], 1), [0, [[7000, 200], [7256, 300]]])
  t.same(await place([300, 200], 1), [1, [[7000, 300], [7512, 200]]])
  t.same(await place([300, 200], 2), [1, [[7000, 300], [7512, 200]]])
})

t.test('nccl: what goes straight into the weights comes in longer runs', async t => {
  const { fake, announce } = await joined(t, 'nccl')
  fake.placeOf = begin => begin
  const mib = 2 ** 20
  const sizes = [4000 * mib, 96 * mib, 1, 4096 * mib, 4097 * mib, 1]
  const receipt = announce(sizes, 50, 4096 * mib)
  fake.send(sizes.length)
  const found: Array<[begin: number, length: number]> = []
  await fake.shut(async () => {
    receipt.prepare(JOB)
    for (let piece = await receipt.next(); piece !== undefined; piece = await receipt.next()) {
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
  await receipt.close()
})

t.test('nccl: a broadcast that fails on its way into the weights has touched them, and one that was not begun has not', async t => {
  const { fake, announce } = await joined(t, 'nccl')
  fake.placeOf = begin => begin
  const receipt = announce([100], 50)
  await fake.shut(async () => {
    receipt.prepare(JOB)
    fake.fault = nativeError('GROUP_BROKEN', 'rank 0 ended')
    await t.rejects(receipt.next(), { code: 'GROUP_BROKEN' })
  })
  t.ok(receipt.touched)
  const { fake: other, group, announce: say } = await joined(t, 'nccl')
  other.placeOf = begin => begin
  const early = say([100], 50)
  await other.shut(async () => {
    early.prepare(JOB)
    group.abandon('it is enough')
    await t.rejects(early.next(), { code: 'GROUP_BROKEN' })
  })
  t.notOk(early.touched)
})

t.test('nothing goes straight into the weights over gloo, or where everything is to be staged', async t => {
  for (const [backend, staged] of [['gloo', false], ['nccl', true]] as const) {
    const { fake, announce } = await joined(t, backend, 60_000, staged)
    fake.placeOf = begin => begin
    const receipt = announce([100, 200], 50)
    fake.send(2)
    await receipt.ready()
    await fake.shut(async () => {
      receipt.prepare(JOB)
      for (let piece = await receipt.next(); piece !== undefined;) piece = await receipt.next()
    })
    await receipt.close()
    t.same(fake.received.map(({ slot }) => slot), [0, 1])
    t.notOk(fake.log.includes('places'))
  }
})

for (const backend of ['gloo', 'nccl'] as const) {
  t.test(`${backend}: what nobody takes is received and dropped before close resolves`, async t => {
    const { fake, groups, announce } = await joined(t, backend)
    const receipt = announce([10, 20, 30], 5)
    let closed = false
    const closing = receipt.close().then(() => {
      closed = true
    })
    fake.send(2)
    while (fake.received.length < 2) await new Promise(setImmediate)
    t.notOk(closed)
    fake.send(1)
    await closing
    t.same(fake.received.map(({ gate }) => gate), Array(3).fill(backend === 'nccl'))
    t.match(receipt.dropped, /received and dropped, and the group stays in step/)
    t.match(groups.counts, { bytesReceived: 60, bytesDropped: 60, failed: 0 })
  })

  t.test(`${backend}: requests are received in the order in which they were announced, refused ones among them`, async t => {
    const { fake, announce } = await joined(t, backend)
    const [a, b, c] = [announce([1]), announce([2, 2]), announce([3])]
    const third = (async () => {
      await c.ready()
      return await (backend === 'nccl' ? fake.shut(async () => await c.next()) : c.next())
    })()
    const closing = b.close()
    await new Promise(resolve => setTimeout(resolve, 20))
    t.same(fake.received, [])
    fake.send(4)
    await a.ready()
    const takeA = async (): Promise<void> => {
      await a.next()
      await a.next()
    }
    await (backend === 'nccl' ? fake.shut(takeA) : takeA())
    await Promise.all([closing, third])
    t.same(fake.received.map(({ parts }) => parts.map(([, bytes]) => bytes)), [[1], [2, 2], [3]])
    await Promise.all([a.close(), c.close()])
  })

  t.test(`${backend}: a broadcast that fails ends the group, names tensors and phase, and init makes it anew`, async t => {
    const { fake, groups, announce, server } = await joined(t, backend)
    const receipt = announce([10, 20], 5)
    fake.send(1)
    await receipt.ready()
    const take = async (): Promise<void> => {
      await receipt.next()
      fake.fault = nativeError('GROUP_BROKEN', 'rank 0 at 10.0.0.1 ended')
      fake.send(0)
      await receipt.next()
    }
    await t.rejects(backend === 'nccl' ? fake.shut(take) : take(), {
      code: 'GROUP_BROKEN',
      message:
        /process group "g" \((gloo|nccl), ranks 1-2 of 3, store at 127\.0\.0\.1:\d+\): receiving tensors 1 to 1 \(piece 2 of 2\) failed after \d+\.\d s: rank 0 at 10\.0\.0\.1 ended/
    })
    await receipt.close()
    t.ok(fake.log.includes('abort'))
    t.throws(() => groups.get('g'), {
      code: 'GROUP_BROKEN',
      message: /rank 0 at 10\.0\.0\.1 ended.*call \/init_weights_update_group again/
    })
    t.match(groups.list, [{ state: 'failed', error: /ended/ }])
    fake.fault = null
    await groups.init({
      name: 'g',
      backend,
      address: '127.0.0.1',
      port: server.address.port,
      rankOffset: 1,
      worldSize: 3,
      barrier: false
    })
    t.match(groups.list, [{ state: /joined|connected/, error: null }])
    while (!fake.log.includes('end')) await new Promise(setImmediate)
  })

  t.test(`${backend}: destroying the group ends what waits in it`, async t => {
    const { groups, fake, announce } = await joined(t, backend)
    const receipt = announce([10])
    const taken = backend === 'nccl'
      ? receipt.ready().then(async () => {
        await fake.shut(async () => await receipt.next())
      })
      : receipt.ready()
    while (!fake.log.includes('receive')) await new Promise(setImmediate)
    const destroyed = groups.destroy('g')
    await t.rejects(taken, { code: 'GROUP_BROKEN', message: /\/destroy_weights_update_group was called/ })
    t.ok(await destroyed)
    await receipt.close()
    t.throws(() => groups.get('g'), { code: 'NOT_FOUND' })
    t.notOk(await groups.destroy('g'))
  })

  t.test(`${backend}: the end of the trainer's store fails a group that is not connected, or receives`, async t => {
    const { fake, group, announce, server } = await joined(t, backend)
    if (backend === 'gloo') { while (group.state !== 'connected') await new Promise(setImmediate) }
    const receipt = backend === 'gloo' ? announce([10]) : undefined
    const waiting = receipt?.ready().catch((error: unknown) => error)
    await server.close()
    if (backend === 'gloo') {
      while (!group.isDead) await new Promise(setImmediate)
      fake.fault = nativeError('GROUP_BROKEN', 'reset')
      fake.send(0)
      t.match(await waiting, { code: 'GROUP_BROKEN' })
      await receipt!.close()
    } else {
      while (group.failure === null) await new Promise(setImmediate)
      t.match(group.failure, { code: 'GROUP_BROKEN', message: /connection to the trainer's store has ended/ })
    }
  })
}

t.test('an id that does not come within the deadline fails the group, and what was announced with it', async t => {
  const fake = new FakeGroups({ isNccl: true })
  const server = await StoreServer.listen({ host: '127.0.0.1', port: 0 })
  const groups = new WeightGroups({ host: fake.host, policy: masterPolicy(), timeoutMs: 60 })
  t.teardown(async () => {
    await groups.close(100)
    await server.close()
  })
  // A machine that halts misses the deadline of the rendezvous, too: once more.
  await eventually(
    async () =>
      await failureOf(groups
        .init({
          name: 'late',
          backend: 'nccl',
          address: '127.0.0.1',
          port: server.address.port,
          rankOffset: 1,
          worldSize: 3,
          barrier: false
        })),
    error => error === null
  )
  const receipt = groups.get('late').announce(layOutPieces([10], 5).pieces, () => '"x"')
  await t.rejects(receipt.ready(), {
    code: 'GROUP_TIMEOUT',
    message: /waiting for the id of rank 0's communicator failed after \d+\.\d s: .*no NCCL id/
  })
  await receipt.close()
  t.equal(fake.shuts, fake.log.includes('end') ? 1 : 0, 'the gate was asked for, if at all, to end it')
  t.notOk(fake.log.includes('connect'))
})

t.test('init: the same again is no second join, other parameters are a conflict, and what cannot be is said before anything is joined', async t => {
  const { groups, server, fake } = await joined(t, 'gloo')
  const spec = {
    name: 'g',
    backend: 'gloo',
    address: '127.0.0.1',
    port: server.address.port,
    rankOffset: 1,
    worldSize: 3,
    barrier: false
  }
  await groups.init(spec)
  t.equal(server.workers, 2)
  await t.rejects(groups.init({ ...spec, worldSize: 4 }), {
    code: 'CONFLICT',
    param: 'group_name',
    message:
      /^group_name: process group "g" .* is in use with other parameters: world_size is 3 there, 4 was asked for; call \/destroy_weights_update_group first$/
  })
  await t.rejects(groups.init({ ...spec, worldSize: 4, address: '10.0.0.7' }), {
    message:
      /: master_address is 127\.0\.0\.1 there, 10\.0\.0\.7 was asked for, world_size is 3 there, 4 was asked for; call/
  })
  for (
    const [change, expected] of [
      [{ name: 'a b' }, { code: 'INVALID_REQUEST', param: 'group_name' }],
      [{ backend: 'mpi' }, { code: 'UNSUPPORTED', param: 'backend' }],
      [{ backend: 'nccl' }, { code: 'GROUP_REFUSED', message: /computes on the CPU; make the group with "gloo"/ }],
      [{ rankOffset: 0 }, { code: 'INVALID_REQUEST', param: 'rank_offset' }],
      [{ rankOffset: 2 }, {
        code: 'INVALID_REQUEST',
        param: 'world_size',
        message: /ranks 2 to 3, but world_size is 3/
      }],
      [{ address: '169.254.169.254' }, { code: 'MASTER_REFUSED' }],
      [{ address: '8.8.8.8' }, { code: 'MASTER_REFUSED' }]
    ] as const
  ) await t.rejects(groups.init({ ...spec, name: 'other', ...change }), expected as { code: string })
  t.equal(groups.list.length, 1)
  t.equal(server.workers, 2)
  t.notOk(fake.log.includes('abort'))
})

t.test('many calls at once join once', async t => {
  const fake = new FakeGroups({ isNccl: false })
  const server = await StoreServer.listen({ host: '127.0.0.1', port: 0 })
  const groups = new WeightGroups({ host: fake.host, policy: masterPolicy(), timeoutMs: 60_000 })
  t.teardown(async () => {
    await groups.close(100)
    await server.close()
  })
  const spec = {
    name: 'g',
    backend: 'gloo',
    address: 'localhost',
    port: server.address.port,
    rankOffset: 1,
    worldSize: 3,
    barrier: false
  }
  await Promise.all([groups.init(spec), groups.init(spec), groups.init(spec)])
  t.equal(server.workers, 2)
})
