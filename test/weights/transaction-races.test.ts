import { setTimeout as sleep } from 'node:timers/promises'
import t from 'tap'
import { faultyAddon, storeOf } from '../helpers/core.ts'
import { memorySource, MEMORY } from '../helpers/memory-source.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'
import { missingNames } from '../../src/weights/plan.ts'
import type { StoredSource, StreamedSource } from '../../src/contract/weight-source.ts'

const addon = faultyAddon()

for (let ticks = 0; ticks < 10; ticks++) {
  t.test(`an update ${ticks} microtask turns after a scope either belongs to it or precedes it`, async t => {
    const { store, close } = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 1, 'bfloat16', { deadlineMs: 1500 })
    t.teardown(close)
    const opening = store.transactions.open({ owner: 'trainer', scope: true })
    for (let i = 0; i < ticks; i++) await Promise.resolve()
    const update = store.update()
    await opening
    const got = await Promise.race([update.then(() => 'an update'), sleep(300, 'it waits')])
    t.equal(got, 'an update')
    await store.transactions.commit(null).catch(() => {})
    await (await update.catch(() => null))?.abort('over')
    await store.close()
  })
}

/** A stream that becomes ready when the test calls `go`. */
function later (source: StoredSource): { source: StreamedSource, go: () => void } {
  const { buffer } = source.sources[0] as { buffer: Buffer }
  let go = (): void => {}
  const ready = new Promise<void>(resolve => {
    go = resolve
  })
  let given = false
  return {
    go,
    source: {
      kind: 'streamed',
      transport: MEMORY,
      tensors: source.tensors,
      verify: source.verify,
      close: source.close,
      stream: {
        ready: async () => {
          await ready
        },
        next: async () => {
          if (given) return undefined
          given = true
          return { begin: 0, length: buffer.length, source: { buffer } }
        }
      }
    }
  }
}

for (const order of ['the one that ends them is ready first', 'the other one is ready first'] as const) {
  t.test(`two connections of a transaction may differ in abort_all_requests: ${order}`, async t => {
    const { store, gates, table, close } = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 1)
    t.teardown(async () => {
      await store.close()
      close()
    })
    const names = missingNames(table, new Set())
    const { id } = await store.transactions.open({ owner: 'trainer' })
    const one = later(memorySource(table, names.slice(0, 3), 1))
    const two = later(memorySource(table, names.slice(3), 1))
    const ending = (await store.update({ transaction: id, abortAllRequests: true })).write(one.source)
    const waiting = (await store.update({ transaction: id, abortAllRequests: false })).write(two.source)
    await sleep(10)
    if (order === 'the one that ends them is ready first') one.go()
    else two.go()
    await sleep(50)
    t.equal(gates.requested?.abort, true)
    one.go()
    two.go()
    await Promise.all([ending, waiting])
  })
}
