import t from 'tap'
import type { Test } from 'tap'
import { openDiskSource } from '../../src/sources/disk/disk.ts'
import { randomValues, writeCheckpoint } from '../helpers/make-checkpoint.ts'
import { adapterEngine } from './adapter-engine.ts'
import type { AdapterEngine } from './adapter-engine.ts'

// Adapters exist once, whichever set of weights is in use.

async function update (t: Test, { engine, arch }: AdapterEngine, seed: number): Promise<void> {
  const folder = t.testdir()
  writeCheckpoint(folder, arch, { values: randomValues(seed) })
  const source = await openDiskSource(folder, { roots: [folder] })
  const update = await engine.update()
  await update.write(source)
  await update.commit({ version: String(seed) })
  await source.close()
}

t.test('adapters stay through swaps, and those that are loaded between two swaps are used with both sets', async t => {
  const options = { enableWeightsCpuBackup: true, tp: 2 }
  const plain = await adapterEngine(t, options)
  const shadow = await adapterEngine(t, { ...options, shadowWeights: true })
  const same = async (what: string): Promise<void> => {
    for (const name of [undefined, 'one', 'two']) {
      if (name !== undefined && shadow.engine.adapters!.get(name) === undefined) continue
      const [wanted, got] = [await plain.generate(name), await shadow.generate(name)]
      t.strictSame([got.tokens, got.logprobs], [wanted.tokens, wanted.logprobs], `${what}: ${name ?? 'base'}`)
    }
  }
  for (const each of [plain, shadow]) await each.load('one', each.adapter(1))
  await same('loaded')
  for (const seed of [2, 3]) {
    for (const each of [plain, shadow]) await update(t, each, seed)
    await same(`weights ${seed}`)
    if (seed === 2) { for (const each of [plain, shadow]) await each.load('two', each.adapter(2)) }
    await same(`weights ${seed} and another adapter`)
  }
  for (const each of [plain, shadow]) {
    await update(t, each, 4)
    await each.engine.releaseMemory()
    await each.engine.resumeMemory()
  }
  t.equal(shadow.engine.weightSets?.live, 1)
  await same('after a sleep')
  for (const each of [plain, shadow]) await each.load('two', each.adapter(3))
  t.equal(shadow.engine.weightSets?.shadow.state, 'absent')
  await same('an adapter that is loaded while the second set has no memory')
})
