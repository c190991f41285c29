import { createHash } from 'node:crypto'
import t from 'tap'
import { parseModelConfig } from '../../src/model/parse-config.ts'
import { fusedTensors, peftTensors, tensorSource, testAdapter } from '../helpers/adapters.ts'
import type { AdapterShape, TestAdapter } from '../helpers/adapters.ts'
import type { CheckpointTensor } from '../helpers/make-checkpoint.ts'
import { streamed } from '../helpers/memory-source.ts'
import { tinyConfig } from '../helpers/tiny-config.ts'
import type { EngineOptions } from '../../src/app/create-engine.ts'
import type { WeightSource } from '../../src/contract/weight-source.ts'
import { adapterEngine } from './adapter-engine.ts'

// Adapters of fused experts and of embeddings lie between each other's elements in a stream.

const MOE = 'Qwen3MoeForCausalLM'
const OPTIONS: EngineOptions = { maxLoras: 3, maxLoraRank: 16, loraTargetModules: ['all'], dtype: 'float32' }

/** An adapter of all modules. */
function made (name: 'Qwen3ForCausalLM' | typeof MOE, shape: Omit<AdapterShape, 'targets'>): TestAdapter {
  return testAdapter(parseModelConfig(tinyConfig(name)), shape)
}

/** A stream that is cut every so many bytes: 1 to 3 modulo 4 cut elements. */
function sent (tensors: readonly CheckpointTensor[], step: number): WeightSource {
  const bytes = tensors.reduce((sum, { data }) => sum + data.length, 1)
  return streamed(tensorSource(tensors), Array.from({ length: Math.ceil(bytes / step) }, (_, i) => i * step))
}

for (const tp of [1, 2]) {
  t.test(`tp ${tp}: fused experts and embeddings of a stream are those of single experts in memory`, async t => {
    const { engine } = await adapterEngine(t, { ...OPTIONS, tp }, MOE)
    const digests = new Set<string>()
    for (const [variant, rank] of [[1, 8], [2, 3], [3, 16]] as const) {
      const adapter = made(MOE, { rank, variant })
      const fused = fusedTensors(adapter)
      t.ok(fused.length < peftTensors(adapter).length / 3, 'most tensors are fused')
      // After fusing: gate and up share A.
      const single = await engine.adapters!.load('single', adapter.config, tensorSource(peftTensors(adapter)))
      const stored = await engine.adapters!.load('stored', adapter.config, tensorSource(fused))
      t.equal(stored.digest, single.digest)
      for (const step of [1e9, 40_003, 4093, 1022]) {
        const report = await engine.adapters!.load('sent', adapter.config, sent(fused, step))
        t.match(report, { digest: single.digest, missingCount: 0, rank, tensors: fused.length }, `every ${step} bytes`)
      }
      digests.add(single.digest)
    }
    t.equal(digests.size, 3)
  })
}

t.test('a stream of an embedding is transposed in a dense model, and cut in its elements', async t => {
  const { engine } = await adapterEngine(t, { ...OPTIONS, tp: 2 })
  for (const [variant, rank] of [[4, 5], [5, 8]] as const) {
    const adapter = made('Qwen3ForCausalLM', { rank, variant })
    const tensors = peftTensors(adapter)
    const stored = await engine.adapters!.load('a', adapter.config, tensorSource(tensors))
    for (const step of [37, 4096, 4477]) {
      const report = await engine.adapters!.load('b', adapter.config, sent(tensors, step))
      t.equal(report.digest, stored.digest, `every ${step} bytes`)
    }
  }
})

t.test('expected checksums of fused tensors are those of the bytes that were sent', async t => {
  const { engine } = await adapterEngine(t, { ...OPTIONS, tp: 2 }, MOE)
  for (const variant of [6, 7]) {
    const adapter = made(MOE, { rank: 4, variant })
    const tensors = fusedTensors(adapter)
    const sums = Object.fromEntries(
      tensors.map(({ name, data }) => [name, createHash('sha256').update(data).digest('hex')])
    )
    const load = async (checksums: Record<string, string>) =>
      await engine.adapters!.load('p', adapter.config, streamed(tensorSource(tensors), [9001]), { checksums })
    t.equal((await load(sums)).tensors, tensors.length)
    for (const { name } of tensors) {
      await t.rejects(load({ ...sums, [name]: '0'.repeat(64) }), {
        code: 'ADAPTER_REFUSED',
        message: new RegExp(`expected_checksums is 0{64}, and the bytes have ${sums[name]}: "${name}"`)
      })
    }
    t.match(engine.adapters!.list(), [{ name: 'p' }], 'the version before stays')
  }
})
