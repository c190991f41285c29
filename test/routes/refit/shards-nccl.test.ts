import t from 'tap'
import type { Test } from 'tap'
import { buildModelTable } from '../../../src/model/model-table.ts'
import { parseModelConfig } from '../../../src/model/parse-config.ts'
import { cudaServer, useStandIn } from '../../helpers/cuda-tensors.ts'
import type { CudaServer } from '../../helpers/cuda-tensors.ts'
import { NcclTrainer, useLoop } from '../../helpers/nccl-trainer.ts'
import { tinyConfig } from '../../helpers/tiny-config.ts'

// Shards over NCCL whose trainer sends nothing, on simulated GPUs. native/test/gpu/group/group_p2p.cc has senders, and
// test/gpu/shards_ways.py has real ones.

useStandIn()
const loop = useLoop()
const UPDATE = '/update_weights_from_shards'

interface World {
  server: CudaServer
  trainer: NcclTrainer
  plan: { id: string, digest: string, chunks: number }
}

/** One rank of a trainer, which has the whole model, and an engine of two ranks. */
async function world (t: Test): Promise<World> {
  const config = tinyConfig('Qwen3ForCausalLM')
  const server = await cudaServer(t, config, { tp: 2 }, { ncclPath: loop, groupTimeoutMs: 1500 })
  const trainer = await NcclTrainer.start(t, { size: 3, loop })
  const [joined] = await Promise.all([
    server.post('/init_weight_transfer_engine', { init_info: trainer.init() }),
    trainer.join()
  ])
  t.equal(joined.status, 200)
  const table = buildModelTable(parseModelConfig(config), 2)
  const { status, body } = await server.post('/shard_plans', {
    format: 'refit.shards/1',
    world: 1,
    layouts: [{ mesh: { shape: [1], ranks: [0] }, placements: ['replicate'] }],
    tensors: [...table.tensors.values()]
      .filter(({ alternative }) => !alternative)
      .map(({ name, shape }) => ({ name, shape, dtype: 'bfloat16', layout: 0 })),
    chunk_bytes: 1 << 15
  })
  t.equal(status, 200)
  return { server, trainer, plan: body }
}

t.test('a trainer that does not send ends the update in time, and what it may have changed is torn', async t => {
  const { server, plan: { id, digest, chunks } } = await world(t)
  t.match(await server.post(UPDATE, { plan: id, digest, group_name: 'weight_transfer' }), {
    status: 500,
    body: {
      error: {
        code: 'WEIGHTS_TORN',
        message: new RegExp(`chunk 1 of ${chunks} of the shards.*\\d+ messages? of rank 0: not done after 1\\.`)
      }
    }
  })
  t.equal(server.engine.weights.state, 'torn')
  t.match(await server.post(UPDATE, { plan: id, digest, group_name: 'weight_transfer' }), {
    body: { error: { message: /Nothing has been received since/ } }
  })
})

t.test('a trainer that leaves is noticed before the deadline', async t => {
  const { server, trainer, plan: { id, digest } } = await world(t)
  const posted = server.post(UPDATE, { plan: id, digest, group_name: 'weight_transfer' })
  await trainer.end()
  const { status, body } = await posted
  t.ok([500, 502].includes(status), JSON.stringify(body))
  t.match(body.error.message, /remote process exited|store has ended/)
})

t.test('a refused update waits for the messages, and aborts the group when none come', async t => {
  const { server, plan: { id, digest } } = await world(t)
  t.match(await server.post(UPDATE, { plan: id, digest, group_name: 'weight_transfer', swap: 'demand' }), {
    status: 409,
    body: {
      error: { message: /could not be received and dropped, so the group was aborted \(.*messages? of rank 0.*make it/ }
    }
  })
  t.equal(server.engine.weights.state, 'current')
  const other = await world(t)
  t.match(await other.server.post(UPDATE, { plan: 'none', group_name: 'weight_transfer' }), {
    status: 409,
    body: { error: { code: 'PLAN_STALE' } }
  })
  t.match(await other.server.post(UPDATE, { plan: id, digest, group_name: 'weight_transfer' }), {
    body: { error: { message: /was aborted: an update from shards was refused: .*no shard plan/ } }
  })
})
