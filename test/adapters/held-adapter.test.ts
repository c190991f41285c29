import { mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import t from 'tap'
import { createEngine } from '../../src/app/create-engine.ts'
import type { HeldAdapter } from '../../src/contract/adapters.ts'
import type { ArchitectureName } from '../../src/model/families.ts'
import { parseModelConfig } from '../../src/model/parse-config.ts'
import { peftTensors, tensorSource, testAdapter } from '../helpers/adapters.ts'
import type { CheckpointTensor } from '../helpers/make-checkpoint.ts'
import { checkpointTensors, writeTensors } from '../helpers/make-checkpoint.ts'
import { tinyConfig } from '../helpers/tiny-config.ts'
import { adapterEngine } from './adapter-engine.ts'

async function tensorsOf (held: HeldAdapter): Promise<CheckpointTensor[]> {
  const chunks: Buffer[] = []
  // The memory of a chunk may be used again.
  for await (const chunk of held.bytes()) chunks.push(Buffer.from(chunk))
  t.equal(chunks.length, held.tensors.length)
  return held.tensors.map((tensor, index) => ({ ...tensor, data: chunks[index]! }))
}

for (
  const [name, tp] of [
    ['Qwen3ForCausalLM', 1],
    ['Qwen3ForCausalLM', 2],
    ['Qwen3MoeForCausalLM', 1],
    ['Qwen3MoeForCausalLM', 2],
    ['LlamaForCausalLM', 2]
  ] as const satisfies ReadonlyArray<readonly [ArchitectureName, number]>
) {
  t.test(`adapters of ${name} on ${tp} ranks are read as they were sent, and load again`, async t => {
    const folder = mkdtempSync(join(tmpdir(), 'refit-held-'))
    const config = tinyConfig(name, { dtype: 'float32' })
    const arch = parseModelConfig(config)
    writeTensors(folder, checkpointTensors(arch, { dtype: 'float32' }))
    writeFileSync(join(folder, 'config.json'), JSON.stringify(config))
    const engine = await createEngine(folder, {
      threads: 1,
      tp,
      maxTotalTokens: 256,
      dtype: 'float32',
      enableLora: true,
      maxLoras: 2,
      maxLoraRank: 16,
      loraTargetModules: ['all']
    })
    t.teardown(async () => {
      await engine.close()
      rmSync(folder, { recursive: true, force: true })
    })
    const adapters = engine.adapters!
    // The second one is smaller, so the slot's rest must not show.
    for (const [variant, rank] of [[1, 16], [2, 3]] as const) {
      const sent = testAdapter(arch, { rank, variant, useRslora: variant === 2 })
      const report = await adapters.load('p', sent.config, tensorSource(peftTensors(sent)))
      const held = await adapters.open!('p')
      t.equal(held.info.digest, report.digest)
      const read = await tensorsOf(held)
      held.close()
      held.close()
      t.equal(adapters.get('p')!.requests, 0)
      const byName = new Map(read.map(tensor => [tensor.name, tensor]))
      const original = peftTensors(sent)
      t.equal(byName.size, original.length)
      for (const { name, shape, data } of original) {
        const own = byName.get(name)!
        t.same(own.shape, shape, name)
        if (!own.data.equals(data)) t.fail(`${name} has other bytes`)
      }
      t.equal((await adapters.load(`copy ${variant}`, held.config, tensorSource(read))).digest, report.digest)
    }
  })
}

t.test('modules of different ranks and scales keep them', async t => {
  const { engine, arch, adapter } = await adapterEngine(t, { tp: 2, dtype: 'float32' }, 'Qwen3MoeForCausalLM')
  const small = testAdapter(arch, {
    rank: 2,
    variant: 5,
    only: name => /layers\.0\.mlp|layers\.1\..*q_proj/.test(name)
  })
  const mixed = adapter(4, 8)
  for (const [name, module] of small.modules) if (mixed.modules.has(name)) mixed.modules.set(name, module)
  const config = {
    ...mixed.config,
    rank_pattern: { 'layers.0.mlp.*': 2, 'layers.1.self_attn.q_proj': 2 },
    alpha_pattern: { q_proj: 3 }
  }
  const adapters = engine.adapters!
  const { digest } = await adapters.load('p', config, tensorSource(peftTensors(mixed)))
  const held = await adapters.open!('p')
  t.match(held.config, { r: 8, lora_alpha: 16, rank_pattern: { 'model.layers.1.self_attn.q_proj': 2 } })
  const read = await tensorsOf(held)
  held.close()
  t.equal((await adapters.load('q', held.config, tensorSource(read))).digest, digest)
})

t.test('a version that is read stays although it is replaced and unloaded', async t => {
  const { engine, adapter, load } = await adapterEngine(t)
  const adapters = engine.adapters!
  const { digest } = await load('p', adapter(1))
  const held = await adapters.open!('p')
  t.equal(adapters.get('p')!.requests, 1)
  await t.rejects(adapters.unload('p', 'refuse'), { code: 'CONFLICT' })
  await load('p', adapter(2))
  await adapters.unload('p')
  // Both other slots are taken by others now.
  await load('a', adapter(3))
  await load('b', adapter(4))
  const read = await tensorsOf(held)
  held.close()
  t.equal((await adapters.load('again', held.config, tensorSource(read))).digest, digest)
  await t.rejects(adapters.open!('p'), { code: 'ADAPTER_UNKNOWN' })
  await engine.releaseMemory(['weights'])
  await t.rejects(adapters.open!('again'), { code: 'ENGINE_ASLEEP' })
})
