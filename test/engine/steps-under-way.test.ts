import t from 'tap'
import { StepsUnderWay } from '../../src/engine/scheduling/steps-under-way.ts'
import type { SchedulerOptions } from '../../src/engine/step-device.ts'
import type { StepResult } from '../../src/native/step.ts'

const WEIGHTS = { set: 0, epoch: 0, version: '1' }

/** Steps on a device that takes no time, by a clock that the test moves. */
function steps (): { under: StepsUnderWay, wait: (ms: number) => void } {
  let now = 1000
  const device = { begin: () => {}, collect: () => ({} as unknown as StepResult) }
  const options: Pick<SchedulerOptions, 'device' | 'now'> = { device: device as never, now: () => now }
  return {
    under: new StepsUnderWay(options),
    wait: ms => {
      now += ms
    }
  }
}

/** The device's time of the step that ends, and the interval since the one before. */
function times (under: StepsUnderWay): [ms: number, interval: number] {
  const { ms, interval } = under.collect()
  return [ms, interval]
}

t.test('an interval contains planning and giving results, and the time of a step does not', async t => {
  const { under, wait } = steps()
  const plan = (ms: number): void => {
    const step = under.prepare(WEIGHTS)
    wait(ms)
    under.begin(step)
  }
  plan(3)
  wait(10)
  t.same(times(under), [10, 13], 'the first step, from its plan on')
  wait(2)
  plan(3)
  wait(10)
  t.same(times(under), [10, 15], 'the next one, from the end of the first on')
})

t.test('a step that overlaps begins where the one before ends', async t => {
  const { under, wait } = steps()
  under.begin(under.prepare(WEIGHTS))
  wait(4)
  under.begin(under.prepare(WEIGHTS))
  wait(6)
  t.same(times(under), [10, 10])
  wait(10)
  t.same(times(under), [10, 10])
})

t.test('where nothing was to be done for a while, no interval contains it', async t => {
  const { under, wait } = steps()
  under.begin(under.prepare(WEIGHTS))
  wait(10)
  under.collect()
  under.rest()
  wait(500)
  const step = under.prepare(WEIGHTS)
  wait(1)
  under.begin(step)
  wait(10)
  t.same(times(under), [10, 11])
})
