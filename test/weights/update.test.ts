import t from 'tap'
import type { Test } from 'tap'
import { setImmediate as turn } from 'node:timers/promises'
import type { Gate, GateKeeper } from '../../src/contract/gate.ts'
import { RefitError } from '../../src/errors.ts'
import { missingNames } from '../../src/weights/plan.ts'
import type { WeightStore } from '../../src/weights/weight-store.ts'
import { faultyAddon, storeOf } from '../helpers/core.ts'
import { memorySource } from '../helpers/memory-source.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'

// An update and its gate, with a gate that shuts and opens only when the test allows it.

const addon = faultyAddon()
const DEADLINE_MS = 60_000

class HeldGates implements GateKeeper {
  readonly deadlines: number[] = []
  readonly steps: string[] = []
  /** While set, the gate waits with this step. */
  held: 'shut' | 'open' | null = null
  failure: Error | null = null
  openFailure: Error | null = null
  /** Resolves when the gate waits with the held step. */
  reached: Promise<void> = Promise.resolve()
  #reach: () => void = () => {}
  #release: () => void = () => {}

  hold (step: 'shut' | 'open'): void {
    this.held = step
    this.reached = new Promise(resolve => {
      this.#reach = resolve
    })
  }

  async shut ({ deadlineMs }: { deadlineMs: number }): Promise<Gate> {
    this.deadlines.push(deadlineMs)
    await this.#step('shut')
    if (this.failure !== null) throw this.failure
    return {
      holders: 0,
      open: async ({ version }) => {
        await this.#step('open')
        if (this.openFailure !== null) throw this.openFailure
        this.steps.push(version)
      }
    }
  }

  release (): void {
    this.held = null
    this.#release()
  }

  async swap (): Promise<void> {}
  async oldEnded (): Promise<void> {}
  relabel (): void {}
  lost (): void {}

  async #step (step: 'shut' | 'open'): Promise<void> {
    if (this.held === step) {
      this.#reach()
      await new Promise<void>(resolve => {
        this.#release = resolve
      })
    }
    this.steps.push(step)
  }
}

function setUp (t: Test): { store: WeightStore, gates: HeldGates, names: string[] } {
  const gates = new HeldGates()
  const { store, table, close } = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 1, 'bfloat16', {
    gates,
    version: 'old',
    deadlineMs: DEADLINE_MS
  })
  t.teardown(close)
  return { store, gates, names: missingNames(table, new Set()) }
}

async function load (store: WeightStore, names: string[]): Promise<void> {
  const update = await store.update()
  await update.write(memorySource(store.table, names, 1))
  await update.commit({})
}

/** False while a promise waits, also after all that can run without the gate has run. */
async function hasSettled (promise: Promise<unknown>): Promise<boolean> {
  let settled = false
  const end = (): void => {
    settled = true
  }
  promise.then(end, end)
  for (let i = 0; i < 20; i++) await turn()
  return settled
}

t.test('a label without a write moves when the gate is shut, not before', async t => {
  const { store, gates, names } = setUp(t)
  await load(store, names)
  gates.steps.length = 0
  gates.hold('shut')
  const update = await store.update()
  const committed = update.commit({ version: 'new' })
  await gates.reached
  t.notOk(await hasSettled(committed))
  t.equal(store.weightVersion, 'old', 'running requests still generate under the old label')
  gates.release()
  await committed
  t.equal(store.weightVersion, 'new')
  t.same(gates.steps, ['shut', 'open', 'new'])
})

t.test('a gate that cannot be shut leaves the label as it was, and lets the next update in', async t => {
  const { store, gates, names } = setUp(t)
  await load(store, names)
  gates.failure = new RefitError('DEADLINE', 'running requests were not finished')
  const update = await store.update()
  await t.rejects(update.commit({ version: 'new' }), { code: 'DEADLINE' })
  t.equal(store.weightVersion, 'old')
  await update.abort('refused')
  gates.failure = null
  await load(store, names)
})

t.test('a gate that cannot be opened lets the next update in, too', async t => {
  const { store, gates, names } = setUp(t)
  await load(store, names)
  gates.openFailure = new RefitError('ENGINE_CLOSED', 'the engine is shutting down')
  const update = await store.update()
  await t.rejects(update.commit({ version: 'new' }), { code: 'ENGINE_CLOSED' })
  const given = await store.update()
  await given.write(memorySource(store.table, names, 2))
  await t.rejects(given.abort('given up'), { code: 'ENGINE_CLOSED' })
  gates.openFailure = null
  await load(store, names)
})

t.test('what opens the gate is awaited: until then an update has not ended, and the next one waits', async t => {
  const { store, gates, names } = setUp(t)
  await load(store, names)
  const ends: Record<string, () => Promise<unknown>> = {
    commit: async () => {
      const update = await store.update()
      await update.write(memorySource(store.table, names, 2))
      await update.commit({ version: 'two' })
    },
    abort: async () => {
      const update = await store.update()
      await update.write(memorySource(store.table, names, 2))
      await update.abort('given up')
    },
    'commit of a transaction': async () => {
      const { id } = await store.transactions.open({ owner: 'trainer' })
      const part = await store.update({ transaction: id })
      await part.write(memorySource(store.table, names, 2))
      await store.transactions.commit(id)
    },
    'release of memory': async () => await store.release(['kv_cache']),
    'resumption of memory': async () => await store.resume(['kv_cache']),
    scramble: async () => {
      await store.scramble(1n)
    },
    'work between two steps': async () => {
      await store.runBetweenSteps(async () => {}, DEADLINE_MS)
    }
  }
  for (const [what, run] of Object.entries(ends)) {
    gates.hold('open')
    const running = run()
    await gates.reached
    t.notOk(await hasSettled(running), what)
    const next = store.update()
    if (what !== 'work between two steps') t.notOk(await hasSettled(next), `an update after ${what}`)
    gates.release()
    await running
    await (await next).abort('it was only a look')
  }
})

t.test("an update's own deadline bounds its wait for the gate, also when it waited for its turn before", async t => {
  const { store, gates, names } = setUp(t)
  await load(store, names)
  const deadlineOf = async (run: () => Promise<unknown>): Promise<number> => {
    gates.deadlines.length = 0
    await run()
    t.equal(gates.deadlines.length, 1)
    return gates.deadlines[0]!
  }
  const write = async (deadlineMs?: number): Promise<void> => {
    const update = await store.update(deadlineMs === undefined ? {} : { deadlineMs })
    await update.write(memorySource(store.table, names, 2))
    await update.commit({})
  }
  const within = (ms: number, limit: number, what: string): void => {
    t.ok(ms >= 1 && ms <= limit, `${what}: ${ms} ms of ${limit}`)
  }
  within(
    await deadlineOf(async () => {
      await write(30_000)
    }),
    30_000,
    'shorter than the default'
  )
  const long = await deadlineOf(async () => {
    await write(600_000)
  })
  t.ok(long > DEADLINE_MS && long <= 600_000, `longer than the default: ${long} ms`)
  within(
    await deadlineOf(async () => {
      await write()
    }),
    DEADLINE_MS,
    'the default'
  )
  const first = await store.update()
  const waits = write(30_000)
  const begun = performance.now()
  await new Promise(resolve => setTimeout(resolve, 50))
  const waited = performance.now() - begun
  gates.deadlines.length = 0
  await first.abort('its turn ends')
  await waits
  within(gates.deadlines[0]!, 30_000 - waited + 1, 'the rest after the turn')
  const { id } = await store.transactions.open({ owner: 'trainer', deadlineMs: 20_000 })
  within(
    await deadlineOf(async () => {
      const part = await store.update({ transaction: id, deadlineMs: 600_000 })
      await part.write(memorySource(store.table, names, 2))
    }),
    20_000,
    'a transaction has a deadline of its own'
  )
  await store.transactions.abort(id, 'done')
})
