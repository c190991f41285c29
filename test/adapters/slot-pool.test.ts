import t from 'tap'
import { setImmediate as turn } from 'node:timers/promises'
import { AdapterVersion } from '../../src/adapters/adapter-version.ts'
import type { SlotMemory } from '../../src/adapters/slot-memory.ts'
import { SlotPool } from '../../src/adapters/slot-pool.ts'

// When a slot may be written again. No version here leaves for host memory, so the pool never calls its SlotMemory.

const version = (name: string): AdapterVersion =>
  new AdapterVersion({ name, version: 1, path: '', rank: 8, modules: [] })

function poolOf (settle: () => Promise<void>): SlotPool {
  return new SlotPool({} as SlotMemory, { slots: 1, limit: 1, settle, deadlineMs: 1000 })
}

t.test('the slot of a request is taken after the step that may still use it', async t => {
  let settled = (): void => {}
  let calls = 0
  const pool = poolOf(async () => {
    calls++
    await new Promise<void>(resolve => {
      settled = resolve
    })
  })
  const first = version('first')
  pool.put(await pool.take(), first)
  await pool.enter(first)
  pool.retire(first)
  pool.leave(first)
  let taken: number | undefined
  const taking = pool.take().then(slot => {
    taken = slot
  })
  await turn()
  t.equal(calls, 1)
  t.equal(taken, undefined, 'the step has not ended')
  settled()
  await taking
  t.equal(taken, 0)
  pool.giveBack(0)
  await pool.take()
  t.equal(calls, 1, 'once is enough')
})

t.test('a scheduler that has ended refuses, and the slot stays free and unsettled', async t => {
  let isClosed = true
  const pool = poolOf(async () => {
    if (isClosed) throw new Error('closed')
  })
  const first = version('first')
  pool.put(await pool.take(), first)
  await pool.enter(first)
  pool.retire(first)
  pool.leave(first)
  await t.rejects(pool.take(), { message: 'closed' })
  await t.rejects(pool.take(), { message: 'closed' })
  isClosed = false
  t.equal(await pool.take(), 0)
})
