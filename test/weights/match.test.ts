import t from 'tap'
import fc from 'fast-check'
import assert from 'node:assert/strict'
import { engineTensors } from '../../src/model/engine-names.ts'
import { buildModelTable } from '../../src/model/model-table.ts'
import { CoveredNames } from '../../src/weights/covered-names.ts'
import { matchTensors } from '../../src/weights/match.ts'
import type { AnnouncedTensor } from '../../src/contract/weight-source.ts'
import { faultyAddon, storeOf } from '../helpers/core.ts'
import { codedChecksum, memorySource } from '../helpers/memory-source.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'

const addon = faultyAddon()
const table = buildModelTable(tinyArchitecture('Qwen3MoeForCausalLM'), 2)
const coverage = new CoveredNames(table)

t.test("a parameter in the engine's own layout is needed from every rank", async t => {
  const [plan] = [...engineTensors(table).values()].filter(({ name }) => name.endsWith('qkv_proj.weight'))
  const { name, shape } = plan!
  const sent = (ranks?: number[]): AnnouncedTensor => (
    { name, shape, dtype: 'bfloat16', source: 0, offset: 0, ...ranks === undefined ? {} : { ranks } }
  )
  const match = (tensors: AnnouncedTensor[], layout: 'engine' | 'checkpoint' = 'engine') =>
    matchTensors(table, coverage, { tensors, layout }, true)
  for (const missing of [0, 1]) {
    t.throws(() => match([sent([1 - missing])]), {
      code: 'WEIGHTS_MISMATCH',
      message: `"${name}" was not sent to rank ${missing}: send every rank its own part of an engine's parameter`
    })
  }
  t.same(match([sent([1]), sent([0])]).matched.map(({ ranks }) => [...ranks!]), [[0], [1]])
  t.same(match([sent([0, 1])]).matched.map(({ ranks }) => [...ranks!]), [[0, 1]])
  t.throws(() => match([sent([0, 1]), sent([1])]), { code: 'WEIGHTS_MISMATCH', message: /send each weight once/ })
  t.throws(() => match([sent([0, 1])], 'checkpoint'), { code: 'WEIGHTS_UNKNOWN_NAME' })
  // Checkpoint tensors are whole, so one rank's is another's.
  const [whole] = [...table.tensors.values()]
  const one: AnnouncedTensor = {
    name: whole!.name,
    shape: whole!.shape,
    dtype: 'bfloat16',
    source: 0,
    offset: 0,
    ranks: [1]
  }
  t.same(match([one], 'checkpoint').matched.map(({ ranks }) => ranks), [null])
})

for (const ranks of [1, 2]) {
  t.test(`tensors in matrices of any rows arrive on ${ranks} ranks as if they were whole`, async t => {
    const { store, table, close } = storeOf(addon, tinyArchitecture('Qwen3MoeForCausalLM'), ranks)
    t.teardown(close)
    const names = [...table.tensors.values()].filter(({ alternative }) => !alternative).map(({ name }) => name)
    let variant = 0
    await fc.assert(
      fc.asyncProperty(
        fc.array(fc.double({ min: 0, max: 1, noNaN: true }), { minLength: 1, maxLength: 4 }),
        async at => {
          variant = 1 + variant % 3
          await store.scramble(BigInt(variant))
          const cut = (tensor: AnnouncedTensor): AnnouncedTensor => {
            const { rows, cols } = table.tensors.get(tensor.name)!
            const ends = [...new Set(at.map(part => Math.floor(part * rows)))].filter(end => end > 0 && end < rows)
            const borders = [0, ...ends.sort((a, b) => a - b), rows]
            const parts = borders.slice(1).map((end, i) => ({
              firstRow: borders[i]!,
              rows: end - borders[i]!,
              cols,
              offset: tensor.offset + 2 * cols * borders[i]!,
              rowBytes: 2 * cols,
              colBytes: 2
            }))
            return { ...tensor, parts }
          }
          const update = await store.update()
          await update.write(memorySource(table, names, variant, cut))
          await update.commit({})
          const { tensors } = await store.checksums()
          assert.deepEqual(tensors, names.map(name => ({ name, checksum: codedChecksum(table, name, variant) })))
        }
      ),
      { numRuns: 10 }
    )
    t.equal(store.state.state, 'current')
  })
}
