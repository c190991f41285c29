import t from 'tap'
import type { Test } from 'tap'
import fc from 'fast-check'
import type { ModelTable } from '../../src/model/architecture.ts'
import { missingNames } from '../../src/weights/plan.ts'
import type { WeightStore } from '../../src/weights/weight-store.ts'
import type { WeightStoreOptions } from '../../src/weights/weight-store.ts'
import { faultyAddon, storeOf } from '../helpers/core.ts'
import type { CountingGates } from '../helpers/core.ts'
import { codedChecksum, memorySource } from '../helpers/memory-source.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'

// Updates of an engine with two sets of weights. Each tensor's bytes depend on its name, the position and the variant.

const addon = faultyAddon()
const arm = addon.armFault!

interface Shadowed {
  store: WeightStore
  gates: CountingGates
  table: ModelTable
  names: string[]
}

/** A store with two sets, loaded in place with variant 1. */
async function shadowed (t: Test, ranks = 2, options: Partial<WeightStoreOptions> = {}): Promise<Shadowed> {
  const { store, gates, table, close } = storeOf(addon, tinyArchitecture('Qwen3MoeForCausalLM'), ranks, 'bfloat16', {
    ...options,
    shadow: true
  })
  t.teardown(() => {
    arm(null)
    close()
  })
  const names = missingNames(table, new Set())
  await put({ store, table }, names, 1, 'in_place')
  return { store, gates, table, names }
}

async function put (
  { store, table }: Pick<Shadowed, 'store' | 'table'>,
  names: string[],
  variant: number,
  swap: 'auto' | 'in_place' | 'demand' = 'demand'
): Promise<void> {
  const update = await store.update({ swap })
  try {
    await update.write(memorySource(table, names, variant))
    await update.commit({ version: `v${variant}` })
  } catch (error) {
    await update.abort('it failed')
    throw error
  }
}

/** The names whose weights in use are not those of the variant that `expected` gives. */
async function wrong ({ store, table, names }: Shadowed, expected: (name: string) => number): Promise<string[]> {
  const { tensors } = await store.checksums()
  const held = new Map(tensors.map(({ name, checksum }) => [name, checksum]))
  return names.filter(name => held.get(name) !== codedChecksum(table, name, expected(name)))
}

const everyThird = (names: string[], from: number): string[] => names.filter((_, i) => i % 3 === from)

t.test('an update writes the other set, and a commit puts it in use without the gate', async t => {
  const { store, gates, table, names, ...all } = await shadowed(t)
  const setUp = { store, gates, table, names, ...all }
  const { addresses } = addon.coreInfo(store.core)
  const shuts = gates.shutCount
  for (const variant of [2, 3, 4]) {
    const { epoch } = store
    const update = await store.update()
    await update.write(memorySource(table, names, variant))
    t.same(await wrong(setUp, () => variant - 1), [], 'nothing has changed before the commit')
    t.equal(store.epoch, epoch)
    t.equal(store.sets?.shadow.state, 'receiving')
    await update.commit({ version: `v${variant}` })
    t.same(await wrong(setUp, () => variant), [], `variant ${variant}`)
    t.equal(store.sets?.live, (variant + 1) % 2)
    t.match(gates.swaps.at(-1), { set: (variant + 1) % 2, version: `v${variant}`, epoch: epoch + 1, flushCache: true })
    t.equal(store.sets?.shadow.state, 'idle')
  }
  t.equal(gates.shutCount, shuts, 'the gate stayed open')
  t.same(addon.coreInfo(store.core).addresses, addresses)
})

t.test('partial updates in turns: after each swap all tensors are the newest that were sent', async t => {
  const setUp = await shadowed(t)
  const { names } = setUp
  const sent = new Map(names.map(name => [name, 1]))
  for (let variant = 2; variant < 9; variant++) {
    const part = everyThird(names, variant % 3)
    await put(setUp, part, variant)
    for (const name of part) sent.set(name, variant)
    t.same(await wrong(setUp, name => sent.get(name)!), [], `after variant ${variant}`)
    t.equal(setUp.store.sets?.shadow.behind, part.length, 'the other set lacks what this update brought')
  }
})

t.test('any sequence of updates, in place, into the shadow, given up and torn, leaves the newest weights', async t => {
  const setUp = await shadowed(t, 1)
  const { store, table, names } = setUp
  const sent = new Map(names.map(name => [name, 1]))
  let variant = 1
  const way = fc.constantFrom<'swap' | 'in_place' | 'abort' | 'tear' | 'sleep'>(
    'swap',
    'swap',
    'in_place',
    'abort',
    'tear',
    'sleep'
  )
  const turns = fc.array(fc.record({ way, from: fc.nat(names.length - 1), count: fc.integer({ min: 1, max: 9 }) }), {
    minLength: 3,
    maxLength: 8
  })
  await fc.assert(
    fc.asyncProperty(turns, async turns => {
      for (const { way, from, count } of turns) {
        const part = names.slice(from, from + count)
        variant++
        if (way === 'sleep') {
          await store.release(['weights'], { keepWeights: true })
          await store.resume(['weights'])
        } else if (way === 'abort') {
          const update = await store.update()
          await update.write(memorySource(table, part, variant))
          await update.abort('it was given up')
        } else if (way === 'tear') {
          arm({ point: 'copy', at: 1 + from % 3, action: 'fail' })
          await put(setUp, part, variant).then(() => {
            for (const name of part) sent.set(name, variant)
          }, () => {})
          arm(null)
        } else {
          await put(setUp, part, variant, way === 'swap' ? 'demand' : 'in_place')
          for (const name of part) sent.set(name, variant)
        }
        const wrongNames = await wrong(setUp, name => sent.get(name)!)
        if (wrongNames.length > 0) throw new Error(`${way}: ${wrongNames.join()}`)
      }
    }),
    { numRuns: 25 }
  )
})

t.test('a tensor that is torn in use does not come back with the values that the other set has', async t => {
  const setUp = await shadowed(t)
  const { store, table, names } = setUp
  await put(setUp, names, 2)
  await put(setUp, names, 2)
  await store.scramble(7n)
  const part = everyThird(names, 0)
  const update = await store.update({ swap: 'demand' })
  await update.write(memorySource(table, part, 3))
  await update.commit({ allowTorn: true })
  t.same(await wrong(setUp, () => 2), names, 'nobody has sent the others')
  t.match(store.state, { state: 'torn' })
  await put(setUp, names.filter(name => !part.includes(name)), 3)
  t.same(await wrong(setUp, () => 3), [])
  t.match(store.state, { state: 'current' })
})

t.test('a failure at any copy leaves the weights in use, their label and their epoch as they were', async t => {
  const setUp = await shadowed(t)
  const { store, names, gates } = setUp
  const part = everyThird(names, 1)
  await put(setUp, everyThird(names, 0), 2)
  const held = (name: string): number => names.indexOf(name) % 3 === 0 ? 2 : 1
  const { epoch } = store
  const swaps = gates.swaps.length
  const errors = new Map<string, number>()
  for (let at = 1;; at++) {
    arm({ point: 'copy', at, action: 'fail' })
    const error = await put(setUp, part, 9).then(() => null, (error: unknown) => error as Error & { code: string })
    arm(null)
    if (error === null) break
    errors.set(error.code, (errors.get(error.code) ?? 0) + 1)
    const bad = await wrong(setUp, held)
    if (bad.length > 0 || store.epoch !== epoch || store.weightVersion !== 'v2' || store.state.state !== 'current') {
      t.fail(`failure ${at}: ${bad.join()} ${store.weightVersion} ${store.epoch} ${JSON.stringify(store.state)}`)
    }
    t.equal(gates.swaps.length, swaps)
    t.equal(store.sets?.shadow.state, 'idle')
  }
  t.ok(errors.get('CHECKPOINT_FORMAT')! > part.length, 'the write failed at each of its tensors')
  t.ok(errors.get('CATCH_UP_FAILED')! > 0, 'and the copies of tensors that it did not bring')
  t.equal(errors.size, 2, [...errors.keys()].join())
  t.same(await wrong(setUp, name => part.includes(name) ? 9 : held(name)), [], 'the repeated update is whole')
})

t.test('a read that goes on through a swap keeps its set from the next update', async t => {
  let release = (): void => {}
  let isHeld = false
  const writes: (number | undefined)[] = []
  const slow: typeof addon = {
    ...addon,
    write: async (core, job, access) => {
      if (isHeld) writes.push(access?.set)
      return await addon.write(core, job, access)
    },
    checksum: async (...rest) => {
      if (isHeld) {
        await new Promise<void>(resolve => {
          release = resolve
        })
      }
      return await addon.checksum(...rest)
    }
  }
  const { store, table, close } = storeOf(slow, tinyArchitecture('Qwen3ForCausalLM'), 2, 'bfloat16', { shadow: true })
  t.teardown(close)
  const names = missingNames(table, new Set())
  await put({ store, table }, names, 1)
  isHeld = true
  const reading = store.checksums()
  await put({ store, table }, names, 2)
  const next = put({ store, table }, names, 3)
  for (let turn = 0; turn < 50; turn++) await new Promise(resolve => setImmediate(resolve))
  t.same(writes, [0], 'the set that is read is not written yet')
  release()
  const { tensors } = await reading
  await next
  t.ok(tensors.every(({ name, checksum }) => checksum === codedChecksum(table, name, 1)), 'all of one version')
  t.same(writes, [0, 1])
  t.equal(store.weightVersion, 'v3')
})
