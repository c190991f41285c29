import { setTimeout } from 'node:timers/promises'
import t from 'tap'
import { Awake } from '../../src/engine/awake.ts'
import { eventually } from '../helpers/eventually.ts'

t.test('keeps the event loop turning for the time asked for, while timers and others have their turns, and sleeps then', async t => {
  const awake = new Awake(8)
  // Where the machine halts for longer than that, once more.
  const seen = await eventually(async () => {
    awake.stay(30)
    awake.stay(10)
    t.equal(awake.isTurning, true)
    await setTimeout(5)
    const { idle, active } = performance.eventLoopUtilization()
    await new Promise<void>(resolve => {
      setImmediate(resolve)
    })
    const since = performance.eventLoopUtilization({ idle, active, utilization: 0 })
    return { isTurning: awake.isTurning, idle: since.idle }
  }, ({ isTurning }) => isTurning)
  t.same(seen, { isTurning: true, idle: 0 }, 'a timer came in between, and it did not sleep')
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
