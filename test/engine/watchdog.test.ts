import t from 'tap'
import { startWatchdog } from '../../src/engine/watchdog.ts'

const heartbeat = (read: () => number | null) =>
  ({
    get step () {
      return read()
    }
  }) as Parameters<typeof startWatchdog>[0]

// The watchdog's own timer does not keep the process alive.
const alive = setInterval(() => {}, 1000)
t.teardown(() => {
  clearInterval(alive)
})

async function pass (ms: number): Promise<void> {
  await new Promise((resolve) => setTimeout(resolve, ms))
}

t.test('a step that does not end is reported once', async (t) => {
  let calls = 0
  await new Promise<void>((resolve) => {
    startWatchdog(heartbeat(() => 5), 40, () => {
      calls++
      resolve()
    })
  })
  await pass(100)
  t.equal(calls, 1)
})

t.test('consecutive steps and pauses between them are never reported', async (t) => {
  let calls = 0
  const enough = new Promise<void>((resolve) => {
    let reads = 0
    const end = startWatchdog(
      heartbeat(() => {
        if (++reads === 30) {
          end()
          resolve()
        }
        return reads % 3 === 0 ? null : reads
      }),
      40,
      () => {
        calls++
      }
    )
  })
  await enough
  t.equal(calls, 0)
})

t.test('time in which the thread did not run is not counted, so a stopped process is not stuck', async (t) => {
  let step = 1
  let calls = 0
  const end = startWatchdog(heartbeat(() => step), 400, () => {
    calls++
  })
  await pass(150)
  Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 1500)
  await pass(1)
  step = 2
  await pass(150)
  end()
  t.equal(calls, 0)
})
