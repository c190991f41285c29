import t from 'tap'
import { setImmediate as turn } from 'node:timers/promises'
import { receiveBytes } from '../../src/process-groups/receive-bytes.ts'
import { LentGate } from '../../src/process-groups/lent-gate.ts'
import { joined } from '../helpers/joined-group.ts'

// Groups over NCCL on an engine with two sets of weights: what arrives beside steps needs the gate to connect.

t.test('bytes that are no weights are received beside steps', async t => {
  const { fake, group } = await joined(t, 'nccl')
  fake.besideSteps = true
  for (let count = 0; count < 2; count++) {
    fake.send()
    t.equal((await receiveBytes(group, 8, 'a number', true)).length, 8)
    t.match(fake.received.pop(), { slot: 0, gate: false })
    t.equal(fake.shuts, 1, 'only the first one, to connect and to allocate')
  }
})

t.test('bytes with the gate shut wait for a live stream ahead before they shut it', async t => {
  const { fake, group, announce } = await joined(t, 'nccl')
  fake.besideSteps = true
  const update = announce([10])
  update.receiveBeside()
  const header = receiveBytes(group, 8, 'a number')
  for (let i = 0; i < 20; i++) await turn()
  t.equal(fake.shuts, 0)
  fake.send()
  t.match(await update.next(), { length: 256 })
  t.equal(await update.next(), undefined)
  fake.send()
  t.equal((await header).length, 8)
  t.same(fake.received.map(({ gate }) => gate), [false, true])
})

t.test('a stream that is dropped beside steps connects while a later request has the gate', async t => {
  const { fake, groups, announce } = await joined(t, 'nccl')
  fake.besideSteps = true
  const refused = announce([10])
  refused.receiveBeside()
  const inPlace = announce([20])
  await fake.shut(async () => {
    const dropping = refused.drop(false)
    for (let i = 0; i < 20; i++) await turn()
    t.same(fake.log, [], 'it waits for the gate')
    const coming = inPlace.next()
    fake.send(2)
    t.match(await coming, { length: 256 })
    await dropping
  })
  t.match(groups.counts, { bytesDropped: 10, failed: 0 })
  await Promise.all([inPlace.close(), refused.close()])
})

t.test('a lent gate stays shut until its guests have ended, and each runs once', async t => {
  const log: string[] = []
  const requests: (() => Promise<void>)[] = []
  const gate = new LentGate(async run => {
    await new Promise<void>((resolve, reject) => {
      requests.push(async () => {
        await run().then(resolve, reject)
      })
    })
  })
  let end: () => void = () => {}
  const guest = gate.use(async () => {
    log.push('guest')
    await new Promise<void>(resolve => {
      end = resolve
    })
    log.push('guest has ended')
  })
  await turn()
  const lending = gate
    .lend(async () => {
      log.push('lender')
    })
    .then(() => log.push('lender has ended'))
  for (let i = 0; i < 5; i++) await turn()
  t.same(log, ['guest', 'lender'])
  end()
  await Promise.all([guest, lending])
  await requests[0]!()
  t.same(log, ['guest', 'lender', 'guest has ended', 'lender has ended'], 'its own request finds it done')
  const failing = gate.use(async () => {
    throw new Error('no connection')
  })
  await turn()
  await requests[1]!()
  await t.rejects(failing, { message: 'no connection' })
})
