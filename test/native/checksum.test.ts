import { openSync } from 'node:fs'
import t from 'tap'
import { native } from '../../src/native/load-addon.ts'
import type { DType, HeldDType } from '../../src/native/dtypes.ts'
import { codedBits, codedJob } from './helpers/coded.ts'
import { plainModel } from './helpers/plain-core.ts'
import type { PlainTensor } from './helpers/plain-core.ts'

const addon = native()
const MASK = (1n << 64n) - 1n

/** A literal implementation of docs/checksum.md. */
function checksum (tensor: PlainTensor, dtype: HeldDType): bigint {
  let sum = 0n
  for (let i = 0; i < tensor.rows * tensor.cols; i++) {
    let z = (BigInt(i >> 3) + 1n) * 0x9E3779B97F4A7C15n & MASK
    z = (z ^ (z >> 30n)) * 0xBF58476D1CE4E5B9n & MASK
    z = (z ^ (z >> 27n)) * 0x94D049BB133111EBn & MASK
    z = z ^ (z >> 31n) | 1n
    sum += BigInt(codedBits(tensor.name, i, dtype)) * z * 0xD1342543DE82EF95n ** BigInt(i & 7)
  }
  return sum & MASK
}

/** The checksum of every tensor, by name. A copy on several ranks counts once. */
async function ofCore (core: number, tensors: PlainTensor[]): Promise<Map<string, bigint>> {
  const rects = tensors.flatMap((tensor, t) => {
    const seen = new Set<string>()
    return tensor.rects.filter(([, , row, col]) => !seen.has(`${row},${col}`) && seen.add(`${row},${col}`)).map(
      rect => [t, ...rect]
    )
  })
  const shares = await addon.checksum(
    core,
    Float64Array.from(rects.flat()),
    Float64Array.from(tensors, tensor => tensor.cols)
  )
  const sums = new Map(tensors.map(tensor => [tensor.name, 0n]))
  for (const [i, rect] of rects.entries()) {
    const { name } = tensors[rect[0]!]!
    sums.set(name, (sums.get(name)! + shares[i]!) & MASK)
  }
  return sums
}

t.test('partial sums of ranks add up to the checksum of the tensor, for any split and dtype', async t => {
  for (const dtype of ['bfloat16', 'float16', 'float32'] as const) {
    for (const ranks of [1, 2, 4]) {
      const { config, tensors } = plainModel({ ranks, dtype, hidden: 64 })
      const core = addon.createCore(config)
      await addon.write(core, codedJob(tensors, { dtype }).job)
      const sums = await ofCore(core, tensors)
      for (const tensor of tensors) {
        t.equal(sums.get(tensor.name), checksum(tensor, dtype), `${tensor.name}, ${dtype}, ${ranks} ranks`)
      }
      addon.closeCore(core)
    }
  }
})

t.test('a write returns checksums of what the parameters hold after it, unless it failed', async t => {
  for (const ranks of [1, 2]) {
    const { config, tensors } = plainModel({ ranks, dtype: 'bfloat16', hidden: 64 })
    const core = addon.createCore(config)
    await addon.scramble(core, 3n)
    const { job } = codedJob(tensors, { dtype: 'bfloat16' })
    const sums = {
      rects: Float64Array.from(tensors.flatMap((tensor, t) => tensor.rects.flatMap(rect => [t, ...rect]))),
      cols: Float64Array.from(tensors, tensor => tensor.cols)
    }
    const outcome = await addon.write(core, { ...job, sums })
    t.same(outcome.sums, await addon.checksum(core, sums.rects, sums.cols))
    t.notOk('sums' in await addon.write(core, job))
    const closed = await addon.write(core, { ...job, sources: [{ fd: openSync('/dev/null', 'r') }], sums })
    t.ok(closed.error)
    t.notOk('sums' in closed)
    t.throws(() => addon.write(core, { ...job, sums: { ...sums, cols: new Float64Array() } }), /tensor 0/)
    addon.closeCore(core)
  }
})

t.test('a parameter of more than 2^18 elements is summed to its last row', async t => {
  const { config, tensors } = plainModel({ vocab: 9001, hidden: 64 })
  const core = addon.createCore(config)
  await addon.write(core, codedJob(tensors).job)
  const sums = await ofCore(core, tensors)
  const embed = tensors.find(({ name }) => name === 'embed')!
  t.ok(embed.rows * embed.cols > 2 * 2 ** 18 && embed.rows * embed.cols % 2 ** 18 !== 0)
  t.equal(sums.get('embed'), checksum(embed, 'bfloat16'))
  // One bit in the last row changes it.
  const change = { ...embed, rects: [[0, 0, embed.rows - 1, 0, 1, 64, embed.rows - 1, 0]] } as PlainTensor
  const bits = (name: string, index: number, dtype: DType): number =>
    codedBits(name, index, dtype) ^ Number(index === embed.rows * embed.cols - 1)
  await addon.write(core, codedJob([change], { bits }).job)
  t.not((await ofCore(core, tensors)).get('embed'), sums.get('embed'))
  addon.closeCore(core)
})

t.test('scrambled weights have other checksums, which depend on the seed', async t => {
  const { config, tensors } = plainModel()
  const core = addon.createCore(config)
  await addon.write(core, codedJob(tensors).job)
  const loaded = await ofCore(core, tensors)
  await addon.scramble(core, 1n)
  const one = await ofCore(core, tensors)
  await addon.scramble(core, 2n)
  const two = await ofCore(core, tensors)
  await addon.scramble(core, 1n)
  t.strictSame(await ofCore(core, tensors), one)
  for (const { name } of tensors) t.equal(new Set([loaded.get(name), one.get(name), two.get(name)]).size, 3, name)
  addon.closeCore(core)
})

t.test('rectangles out of bounds are refused by name', async t => {
  const { config } = plainModel()
  const core = addon.createCore(config)
  const of = (rect: number[], cols: number[]) => () =>
    addon.checksum(core, Float64Array.from(rect), Float64Array.from(cols))
  t.throws(of([1, 0, 0, 0, 0, 1, 1, 0, 0], [64]), { message: 'rectangle 0 (tensor 1): tensorCols has 1 entries' })
  t.throws(of([0, 0, 0, 0, 60, 1, 5, 0, 0], [64]), {
    message: "rectangle 0 (tensor 0): columns 60 + 5 exceed the tensor's 64"
  })
  t.throws(of([0, 0, 0, 0, 0, 129, 64, 0, 0], [64]), {
    message: 'rectangle 0 (tensor 0): rows 0 + 129 exceed parameter embed [128, 64]'
  })
  t.throws(of([0, 0, 0, 2 ** 52, 0, 1, 64, 0, 0], [2 ** 52]), {
    message: 'rectangle 0 (tensor 0): rows 4503599627370496 + 1 do not fit 63 bits'
  })
  t.throws(of([0, 0, 0, 0, 0, 1, 64, 0, 0], [64.5]), {
    message: 'tensorCols[0]: expected an integer from 0 to 9007199254740991, got 64.5'
  })
  t.throws(of([0, 0], [64]), { message: 'rects: expected a multiple of 9 entries, got 2' })
  t.throws(() => addon.scramble(core, 5 as unknown as bigint), { message: 'seed: expected a bigint, got 5' })
  t.throws(() => addon.scramble(core, -1n), { message: 'seed: expected a bigint from 0 to 2^64 - 1' })
  t.strictSame(await addon.checksum(core, new Float64Array(0), new Float64Array(0)), new BigUint64Array(0))
  addon.closeCore(core)
})
