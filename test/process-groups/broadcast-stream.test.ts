import t from 'tap'
import { setImmediate as turn } from 'node:timers/promises'
import { nativeError } from '../helpers/fake-groups.ts'
import { joined } from '../helpers/joined-group.ts'

t.test('gloo: the first piece is received before the gate shuts, the next one while it is written', async t => {
  const { fake, announce } = await joined(t, 'gloo')
  const stream = announce([600, 600, 600])
  fake.send(1)
  await stream.ready()
  t.same(fake.received, [{ slot: 0, parts: [[0, 600]], gate: false }])
  const first = await stream.next()
  t.match(first, { begin: 0, length: 768, source: { staged: { slot: 0 } } })
  fake.send(1)
  while (fake.received.length < 2) await new Promise(setImmediate)
  t.equal(fake.received[1]!.slot, 1, 'the other slot, before the next call')
  t.match(await stream.next(), { begin: 768, source: { staged: { slot: 1 } } })
  fake.send(1)
  t.match(await stream.next(), { begin: 1536, source: { staged: { slot: 0 } } })
  t.equal(await stream.next(), undefined)
  await stream.close()
  t.equal(stream.dropped, undefined)
  t.equal(fake.shuts, 0)
})

t.test('a model-sized bucket has one slot, requests of several pieces and small buckets have two', async t => {
  const { fake, group, announce } = await joined(t, 'gloo')
  const GB = 2 ** 30
  const take = async (sizes: number[], pieceBytes: number): Promise<void> => {
    const stream = announce(sizes, pieceBytes)
    fake.send(sizes.length)
    await stream.ready()
    for (let piece = await stream.next(); piece !== undefined;) piece = await stream.next()
    await stream.close()
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

t.test('nccl: no call that needs the gate is made before the gate is shut', async t => {
  const { fake, announce } = await joined(t, 'nccl')
  const stream = announce([10, 20], 5)
  fake.send(2)
  await stream.ready()
  t.same(fake.log, [])
  await fake.shut(async () => {
    await stream.next()
    await stream.next()
    t.equal(await stream.next(), undefined)
  })
  t.same(fake.log, ['connect', 'stage', 'begin', 'begin', 'receive', 'receive'])
  await stream.close()
})

t.test('nccl: a receive begins once its slot is free, before the previous one is awaited', async t => {
  const { fake, announce } = await joined(t, 'nccl')
  const stream = announce([10, 20, 30, 40], 5)
  await stream.ready()
  await fake.shut(async () => {
    for (let piece = 0; piece < 4; piece++) {
      fake.log.length = 0
      const coming = stream.next()
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
    t.equal(await stream.next(), undefined)
  })
  t.same(fake.received.map(({ slot }) => slot), [0, 1, 0, 1])
  await stream.close()
})

t.test('nccl: receives that began ahead are awaited when they are dropped, and after a failure', async t => {
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
    dropped: 'The announced broadcasts were received and dropped, and the group stays in step'
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

for (const backend of ['gloo', 'nccl'] as const) {
  t.test(`${backend}: close receives and drops the pieces that were not read`, async t => {
    const { fake, groups, announce } = await joined(t, backend)
    const stream = announce([10, 20, 30], 5)
    let closed = false
    const closing = stream.close().then(() => {
      closed = true
    })
    fake.send(2)
    while (fake.received.length < 2) await new Promise(setImmediate)
    t.notOk(closed)
    fake.send(1)
    await closing
    t.same(fake.received.map(({ gate }) => gate), Array(3).fill(backend === 'nccl'))
    t.match(stream.dropped, /received and dropped, and the group stays in step/)
    t.match(groups.counts, { bytesReceived: 60, bytesDropped: 60, failed: 0 })
  })

  t.test(`${backend}: requests are received in the order of their announcement, refused ones included`, async t => {
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
}
