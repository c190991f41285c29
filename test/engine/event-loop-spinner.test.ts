import { setTimeout } from 'node:timers/promises'
import t from 'tap'
import { EventLoopSpinner } from '../../src/engine/event-loop-spinner.ts'
import { eventually } from '../helpers/eventually.ts'

t.test('the spinner keeps the event loop running for the requested time, and timers run meanwhile', async t => {
  const spinner = new EventLoopSpinner(8)
  // Repeated if the machine halts for longer than that.
  const seen = await eventually(async () => {
    spinner.stay(30)
    spinner.stay(10)
    t.equal(spinner.isTurning, true)
    await setTimeout(5)
    const { idle, active } = performance.eventLoopUtilization()
    await new Promise<void>(resolve => {
      setImmediate(resolve)
    })
    const since = performance.eventLoopUtilization({ idle, active, utilization: 0 })
    return { isTurning: spinner.isTurning, idle: since.idle }
  }, ({ isTurning }) => isTurning)
  t.same(seen, { isTurning: true, idle: 0 }, 'a timer came in between, and it did not sleep')
  while (spinner.isTurning) await setTimeout(5)
  spinner.stay(1)
  t.equal(spinner.isTurning, true, 'again')
  while (spinner.isTurning) await setTimeout(5)
})

t.test('the spinner does nothing on a machine with few processors', async t => {
  const spinner = new EventLoopSpinner(4)
  spinner.stay(1e6)
  t.equal(spinner.isTurning, false)
})
