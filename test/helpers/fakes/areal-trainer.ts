import type { Test } from 'tap'
import { readArchitecture } from '../../../src/model/read-config.ts'
import { peftTensors, testAdapter } from '../adapters.ts'
import type { gatewayTo } from '../gateway.ts'
import { GroupTrainer } from '../group-trainer.ts'

/**
 * Joins the engines behind a gateway in a group of `size` ranks, as AReaL does. Returns a function that broadcasts a
 * version of an adapter, "p-vVERSION", in so many parts.
 */
export async function arealTrainer (
  t: Test,
  gateway: Awaited<ReturnType<typeof gatewayTo>>,
  model: string,
  size: number
): Promise<(version: number, parts?: number) => Promise<void>> {
  const trainer = await GroupTrainer.start({ size })
  t.teardown(async () => {
    await trainer.end().catch(() => {})
  })
  const [init] = await Promise.all([gateway.post('/areal_init_weights_update_group', trainer.init()), trainer.join()])
  t.equal(init.status, 200, JSON.stringify(init.body))
  return async (version, parts = 1) => {
    const adapter = testAdapter(await readArchitecture(model), {
      rank: 4,
      variant: version,
      only: module => !/embed_tokens|lm_head/.test(module)
    })
    const tensors = peftTensors(adapter)
    const size = Math.ceil(tensors.length / parts)
    for (let first = 0; first < tensors.length; first += size) {
      const part = tensors.slice(first, first + size)
      const { r, lora_alpha: alpha, target_modules: targets } = adapter.config as Record<string, unknown>
      const body = trainer.update(part, {
        lora_name: `p-v${version}`,
        lora_int_id: 1,
        lora_target_modules: targets,
        lora_rank: r,
        lora_alpha: alpha,
        lora_bias: 'none',
        base_model_name: 'adder'
      })
      t.equal((await gateway.post('/areal_set_update_weight_meta_lora', body)).status, 200)
      const sent = trainer.send(part)
      // AReaL repeats the announcement here, and refit does not need it.
      const { status, body: reply } = await gateway.post('/areal_update_weights_lora_xccl', version === 1 ? body : {})
      await sent
      t.equal(status, 200, JSON.stringify(reply))
    }
  }
}
