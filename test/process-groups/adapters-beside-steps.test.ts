import t from 'tap'
import { parseModelConfig } from '../../src/model/parse-config.ts'
import { peftTensors, tensorSource, testAdapter } from '../helpers/adapters.ts'
import { cudaServer, useStandIn } from '../helpers/cuda-tensors.ts'
import { NcclTrainer, useLoop } from '../helpers/nccl-trainer.ts'
import { tinyConfig } from '../helpers/tiny-config.ts'

// Adapters that a trainer broadcasts over NCCL to an engine with two sets of weights, on simulated GPUs.

useStandIn()
const loop = useLoop()
const UPDATE = '/load_lora_adapter_from_distributed'

t.test('broadcasts of an adapter arrive while steps go on, and none stalls', async t => {
  const config = tinyConfig('Qwen3ForCausalLM')
  const arch = parseModelConfig(config)
  const options = { enableLora: true, maxLoras: 2, maxLoraRank: 16, shadowWeights: true }
  const server = await cudaServer(t, config, options, { ncclPath: loop, groupTimeoutMs: 60_000 })
  const { engine } = server
  const trainer = await NcclTrainer.start(t, { size: 2, loop })
  const [joined] = await Promise.all([
    server.post('/init_weight_transfer_engine', { init_info: trainer.init() }),
    trainer.join()
  ])
  t.equal(joined.status, 200, JSON.stringify(joined.body))

  const stop = new AbortController()
  const generated = (async () => {
    while (!stop.signal.aborted) {
      const body = { input_ids: [1, 2], sampling_params: { max_new_tokens: 64, ignore_eos: true } }
      t.match(await server.post('/generate', body), { status: 200 })
    }
  })()
  const steps = async (count: number): Promise<void> => {
    const before = engine.stats.steps
    while (engine.stats.steps < before + count) await new Promise(resolve => setTimeout(resolve, 2))
  }
  const digests: string[] = []
  for (const variant of [1, 2, 3]) {
    const adapter = testAdapter(arch, { variant, rank: 8, targets: ['q_proj', 'v_proj'] })
    const tensors = peftTensors(adapter)
    const posted = server.post(UPDATE, {
      names: tensors.map(({ name }) => name),
      dtypes: tensors.map(({ dtype }) => dtype),
      shapes: tensors.map(({ shape }) => shape),
      group_name: 'weight_transfer',
      lora_name: 'p',
      config_dict: adapter.config,
      upsert: true
    })
    for (const [index, { data }] of tensors.entries()) {
      await trainer.broadcast(data)
      // A trainer that waits between two tensors stops no step.
      if (index === 2) await steps(20)
    }
    const { status, body } = await posted
    t.equal(status, 200, JSON.stringify(body))
    t.match(body.adapter, { version: 2 * variant - 1, missing_count: 0 })
    const { digest } = await engine.adapters!.load('same', adapter.config, tensorSource(tensors))
    t.equal(body.adapter.digest, digest)
    digests.push(digest)
    await engine.adapters!.unload('same')
  }
  stop.abort()
  await generated
  t.equal(new Set(digests).size, 3)
  const { updates } = await (await fetch(`${server.url}/updates`)).json() as { updates: object[] }
  t.match(updates, Array.from({ length: 3 }, () => ({ kind: 'adapter', outcome: 'done', stall_ms: null })))
})
