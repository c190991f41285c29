import t from 'tap'
import { buildModelTable } from '../../src/model/model-table.ts'
import type { ShardAnnouncement, ShardLayout, ShardTensor } from '../../src/shards/announcement.ts'
import { compilePlan } from '../../src/shards/compile-plan.ts'
import { ShardPlans } from '../../src/shards/shard-plans.ts'
import { CoveredNames } from '../../src/weights/covered-names.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'

const table = buildModelTable(tinyArchitecture('Qwen3ForCausalLM'), 2)
const coverage = new CoveredNames(table)
const NAME = 'model.layers.0.mlp.down_proj.weight'
const { shape } = table.tensors.get(NAME)!
const [rows, cols] = shape as [number, number]

function plan (layout: ShardLayout, tensor: Partial<ShardTensor> = {}, more: Partial<ShardAnnouncement> = {}): unknown {
  return compilePlan(table, coverage, {
    world: 4,
    layouts: [layout],
    tensors: [{ name: NAME, shape, dtype: 'bfloat16', layout: 0, ...tensor }],
    chunkBytes: 1 << 20,
    allowMissing: true,
    ...more
  })
}

const whole: ShardLayout = { kind: 'mesh', shape: [1], ranks: [0], placements: [{ kind: 'replicate' }] }
const halves = (second: number): ShardLayout => ({
  kind: 'boxes',
  boxes: [
    { rank: 0, offset: [0, 0], shape: [rows / 2, cols] },
    { rank: 1, offset: [second, 0], shape: [rows / 2, cols] }
  ]
})

t.test('wrong layouts are refused by the name of the tensor', async t => {
  const wrong: Array<[ShardLayout, RegExp, Partial<ShardTensor>?, Partial<ShardAnnouncement>?]> = [
    [{ ...whole, shape: [2, 2] }, /mesh of 2 x 2 has 4 places, and 1 ranks are listed/],
    [{ ...whole, shape: [2], ranks: [0, 0] }, /rank is listed twice/],
    [{ ...whole, placements: [] }, /1 dimensions, and there are 0 placements/],
    [{ ...whole, ranks: [4] }, /names rank 4, and the world has 4 ranks/],
    [{ ...whole, placements: [{ kind: 'shard', dim: 2, split: 1 }] }, /cuts dimension 2/],
    [halves(rows / 2 - 1), /overlap, and are not copies/],
    [{ kind: 'boxes', boxes: [{ rank: 0, offset: [0, 1], shape }] }, /is not inside of/],
    [{ kind: 'boxes', boxes: [{ rank: 0, offset: [0], shape: [1] }] }, /dimensions of its shape/],
    [{ kind: 'flat', ranges: [{ rank: 0, from: 0, to: rows * cols + 1 }] }, /are not inside of/],
    [whole, /there is no layout 7/, { layout: 7 }],
    [whole, /no multiple of the/, { into: [{ name: NAME, rows: rows - 1 }] }]
  ]
  for (const [layout, message, tensor, more] of wrong) {
    t.throws(() => plan(layout, tensor, more), { code: 'SHARD_LAYOUT', message, param: NAME })
  }
})

t.test('a part that nobody holds is named by rows and columns', async t => {
  t.throws(() =>
    plan(halves(rows / 2), { shape: [rows, cols] }, {
      layouts: [{ kind: 'boxes', boxes: [{ rank: 3, offset: [2, 0], shape: [rows - 2, cols] }] }]
    }), { code: 'SHARDS_INCOMPLETE', message: new RegExp(`no rank holds rows 0 to 1, columns 0 to ${cols - 1}`) })
  t.throws(() => plan({ kind: 'flat', ranges: [{ rank: 0, from: 0, to: rows * cols - 3 }] }), {
    code: 'SHARDS_INCOMPLETE',
    message: new RegExp(`no rank holds row ${rows - 1}, columns ${cols - 3} to ${cols - 1}`)
  })
  // torch's own offsets of interleaved shards: all ranks claim neighbours.
  t.doesNotThrow(() =>
    plan({
      kind: 'mesh',
      shape: [4],
      ranks: [0, 1, 2, 3],
      placements: [{ kind: 'shard', dim: 0, split: 2 }]
    })
  )
})

t.test('missing, double and unknown tensors, and other shapes, are named', async t => {
  t.throws(() => plan(whole, {}, { allowMissing: false }), {
    code: 'SHARDS_INCOMPLETE',
    message: /tensors of the model are not announced: model\.embed_tokens\.weight/
  })
  t.throws(() => plan(whole, { name: 'model.layers.9.mlp.down_proj.weight' }), { code: 'WEIGHTS_UNKNOWN_NAME' })
  t.throws(() => plan(whole, { shape: [cols, rows] }), { code: 'WEIGHTS_MISMATCH', param: NAME })
  t.throws(() => plan(whole, { shape: [rows + 2, cols] }), { code: 'WEIGHTS_MISMATCH' }, 'padding is announced')
  t.throws(() => plan(whole, { name: 'fused', shape: [2 * rows, cols], into: [{ name: NAME, rows }] }), {
    code: 'WEIGHTS_MISMATCH',
    message: /in "fused"/
  })
  const twin = { name: 'fused', shape, dtype: 'bfloat16' as const, layout: 0, into: [{ name: NAME, rows }] }
  const own = { name: NAME, shape, dtype: 'bfloat16' as const, layout: 0 }
  t.throws(() => plan(whole, {}, { tensors: [own, own] }), { code: 'SHARD_LAYOUT', message: /announced twice/ })
  t.throws(() => plan(whole, {}, { tensors: [own, twin] }), { code: 'SHARD_LAYOUT', message: /each weight once/ })
})

t.test('plans are known by their contents, and forgotten in the order of their use', async t => {
  const plans = new ShardPlans(table)
  const announcement = (chunkBytes: number): ShardAnnouncement => ({
    world: 1,
    layouts: [whole],
    tensors: [{ name: NAME, shape, dtype: 'bfloat16', layout: 0 }],
    chunkBytes,
    allowMissing: true
  })
  const { plan, isNew } = plans.announce(announcement(5000))
  t.equal(isNew, true)
  t.same(plans.announce(announcement(5000)), { plan, isNew: false })
  t.equal(plans.get(plan.id, plan.digest), plan)
  t.throws(() => plans.get(plan.id, 'another'), { code: 'PLAN_STALE', message: /has .*, the request has "another"/ })
  const other = new ShardPlans(buildModelTable(tinyArchitecture('Qwen3ForCausalLM'), 1))
  t.not(other.announce(announcement(5000)).plan.digest, plan.digest, 'another engine: another digest')
  for (let size = 1; size < 8; size++) plans.announce(announcement(5000 + size))
  plans.get(plan.id)
  plans.announce(announcement(6000))
  t.equal(plans.list.length, 8)
  t.equal(plans.get(plan.id), plan, 'it was used last')
  t.equal(plans.forget(plan.id), true)
  t.throws(() => plans.get(plan.id), { code: 'PLAN_STALE', message: /announce the shards again/ })
})
