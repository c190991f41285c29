import t from 'tap'
import { kvBytesPerToken, kvPages } from '../../src/engine/memory/kv-budget.ts'
import type { KvBudgetOptions } from '../../src/engine/memory/kv-budget.ts'
import { RateMeter } from '../../src/engine/rate-meter.ts'
import { seedSource } from '../../src/engine/seed-source.ts'
import type { Architecture } from '../../src/model/architecture.ts'

const ARCH = { layers: 3, kvHeads: 2, headDim: 8 } as unknown as Architecture
const PAGE = 2 * 3 * 2 * 8 * 2 * 16
const OPTIONS: KvBudgetOptions = {
  pageBytes: PAGE,
  pageSize: 16,
  contextLength: 100,
  maxRunningRequests: 4,
  maxTotalTokens: null,
  memFraction: 0.5,
  availableBytes: 1e9,
  where: 'free memory',
  weightBytes: 0,
  otherBytes: 0
}

t.test('the KV cache repeats a head on several ranks if there are more ranks than heads', async (t) => {
  t.equal(kvBytesPerToken(ARCH, 1, 2), 2 * 3 * 2 * 8 * 2)
  t.equal(kvBytesPerToken(ARCH, 2, 2), 2 * 3 * 2 * 8 * 2)
  t.equal(kvBytesPerToken(ARCH, 4, 4), 2 * 3 * 4 * 8 * 4)
})

t.test('KV pages: as many as running requests need, fewer if memory is short, or as configured', async (t) => {
  t.equal(kvPages(OPTIONS), 4 * 7)
  t.equal(
    kvPages({ ...OPTIONS, availableBytes: 2 * (5 * PAGE + 100), weightBytes: 100 }),
    5,
    'half of the free memory less the weights'
  )
  t.equal(
    kvPages({ ...OPTIONS, availableBytes: 2 * (5 * PAGE + 99), weightBytes: 60, otherBytes: 40 }),
    4,
    'and less what a step needs'
  )
  t.equal(kvPages({ ...OPTIONS, availableBytes: 10 * PAGE, memFraction: 0.9 }), 9)
  t.equal(kvPages({ ...OPTIONS, maxTotalTokens: 100, availableBytes: 0 }), 6)
  t.throws(() => kvPages({ ...OPTIONS, availableBytes: 1e6, weightBytes: 5e6 }), {
    code: 'CONFIG',
    message: /0\.5 of 1\.0 MB free memory holds no KV cache beside 5\.0 MB of weights \(/
  })
  t.throws(
    () =>
      kvPages({
        ...OPTIONS,
        availableBytes: 1e6,
        weightBytes: 5e6,
        otherBytes: 2e6,
        where: 'free memory of GPU 3 (H100)'
      }),
    { message: /free memory of GPU 3 \(H100\) holds no KV cache beside 5\.0 MB of weights and 2\.0 MB of buffers/ }
  )
})

t.test('a rate counts about the last second and forgets earlier events', async (t) => {
  let now = 12_345
  const meter = new RateMeter(() => now)
  meter.add(5)
  now += 500
  meter.add(7)
  t.equal(meter.perSecond, 12)
  now += 600
  t.equal(meter.perSecond, 7)
  now += 10_000
  t.equal(meter.perSecond, 0)
  meter.add(1)
  t.equal(meter.perSecond, 1)
})

t.test('seeds drawn from a seed are SplitMix64, and random ones differ', async (t) => {
  const draw = seedSource(1234567n)
  // The published test vector of the generator.
  t.same([draw(), draw(), draw(), draw(), draw()], [
    6457827717110365317n,
    3203168211198807973n,
    9817491932198370423n,
    4593380528125082431n,
    16408922859458223821n
  ])
  const random = seedSource(null)
  t.equal(new Set(Array.from({ length: 1000 }, random)).size, 1000)
})
