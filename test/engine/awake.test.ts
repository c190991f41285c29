import { setTimeout } from 'node:timers/promises'
import t from 'tap'
import { Awake } from '../../src/engine/awake.ts'

t.test('keeps the event loop turning for the time asked for, while timers and others have their turns, and sleeps then', async t => {
  const awake = new Awake(8)
  awake.stay(30)
  awake.stay(10)
  t.equal(awake.isTurning, true)
  await setTimeout(5)
  t.equal(awake.isTurning, true, 'a timer came in between')
  const { idle, active } = performance.eventLoopUtilization()
  await new Promise<void>(resolve => { setImmediate(resolve) })
  const since = performance.eventLoopUtilization({ idle, active, utilization: 0 })
  t.equal(since.idle, 0, 'it did not sleep')
  while (awake.isTurning) await setTimeout(5)
  awake.stay(1)
  t.equal(awake.isTurning, true, 'again')
  while (awake.isTurning) await setTimeout(5)
})

t.test('does nothing where there are few processors', async t => {
  const awake = new Awake(4)
  awake.stay(1e6)
  t.equal(awake.isTurning, false)
})
