import t from 'tap'
import { setTimeout as sleep } from 'node:timers/promises'
import { ExclusiveSection } from '../../src/weights/exclusive-section.ts'
import { CallJoiner } from '../../src/weights/call-joiner.ts'

t.test('holders enter one at a time and in the order of their arrival', async t => {
  const section = new ExclusiveSection(10)
  const order: number[] = []
  let inside = 0
  await Promise.all([0, 1, 2, 3, 4].map(async id => {
    const leave = await section.enter(60_000)
    t.equal(++inside, 1, 'alone inside')
    order.push(id)
    await sleep(2)
    inside--
    leave()
  }))
  t.same(order, [0, 1, 2, 3, 4])
})

t.test('a full queue is a CONFLICT and an expired wait a DEADLINE, and both leave the queue intact', async t => {
  const section = new ExclusiveSection(1)
  const leave = await section.enter(60_000)
  const waiting = section.enter(20)
  await t.rejects(section.enter(60_000), { code: 'CONFLICT' })
  await t.rejects(waiting, { code: 'DEADLINE' })
  const next = section.enter(60_000)
  leave()
  const leaveNext = await next
  leave()
  const last = section.enter(60_000)
  let entered = false
  void last.then(() => {
    entered = true
  })
  await sleep(10)
  t.notOk(entered, 'leaving twice admits one waiter')
  leaveNext()
  ;(await last)()
})

t.test('holders with different names are inside together, and none overtakes a waiter with the same name', async t => {
  const section = new ExclusiveSection(10)
  const order: string[] = []
  const enter = (names: string): Promise<() => void> =>
    section.enter(60_000, names === '*' ? null : new Set(names)).then(leave => {
      order.push(names)
      return leave
    })
  const first = await enter('ab')
  const second = await enter('c')
  const waiting = [enter('bd'), enter('de'), enter('f'), enter('*'), enter('g')]
  await sleep(5)
  t.same(order, ['ab', 'c', 'f'], 'de waits behind bd, and g behind the exclusive holder')
  first()
  await sleep(5)
  t.same(order, ['ab', 'c', 'f', 'bd'])
  second()
  ;(await waiting[0]!)()
  ;(await waiting[2]!)()
  await sleep(5)
  t.same(order, ['ab', 'c', 'f', 'bd', 'de'])
  ;(await waiting[1]!)()
  await sleep(5)
  t.same(order.slice(5), ['*'])
  ;(await waiting[3]!)()
  await waiting[4]!
  t.same(order.slice(5), ['*', 'g'])
})

t.test('a waiter that expires or is refused admits those that waited behind it', async t => {
  const section = new ExclusiveSection(10)
  const leave = await section.enter(60_000, new Set('a'))
  const expiring = section.enter(20, new Set('ab'))
  const behind = section.enter(60_000, new Set('b'))
  await t.rejects(expiring, { code: 'DEADLINE' })
  const leaveBehind = await behind
  const away = section.enter(60_000)
  section.refuseWaiting(new Error('go'))
  await t.rejects(away, { message: 'go' })
  ;(await section.enter(60_000, new Set('c')))()
  leave()
  leaveBehind()
  ;(await section.enter(60_000))()
})

t.test('a deadline beyond the maximum of setTimeout still waits', async t => {
  const section = new ExclusiveSection(1)
  const leave = await section.enter(Infinity)
  const next = section.enter(Infinity)
  await sleep(20)
  leave()
  ;(await next)()
})

t.test('identical calls share one run and its failure, and run again afterwards', async t => {
  const joiner = new CallJoiner<number>()
  let runs = 0
  const run = async (): Promise<number> => {
    await sleep(5)
    return ++runs
  }
  t.same(await Promise.all([joiner.join('a', run), joiner.join('a', run), joiner.join('b', run)]), [1, 1, 2])
  t.equal(await joiner.join('a', run), 3)
  const fail = async (): Promise<number> => {
    await sleep(1)
    throw new Error('no')
  }
  await Promise.all([t.rejects(joiner.join('c', fail)), t.rejects(joiner.join('c', fail))])
  t.equal(await joiner.join('c', run), 4)
})
