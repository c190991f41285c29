import t from 'tap'
import { native } from '../../src/native/load-addon.ts'
import { buildModelTable } from '../../src/model/model-table.ts'
import { parseModelConfig } from '../../src/model/parse-config.ts'
import { checkVariant, sendModel } from '../helpers/cuda-model.ts'
import { cudaEntry, cudaServer, useStandIn } from '../helpers/cuda-tensors.ts'
import { tinyConfig } from '../helpers/tiny-config.ts'

// Memory of simulated GPUs, written into the second set in slices of 1 MiB. The embedding and the head have 2 each.

useStandIn()
const UPDATE = '/update_weights_from_tensor'

t.test('slices read a segment through one mapping, which is closed after the last one or a failure', async t => {
  const config = tinyConfig('Qwen3ForCausalLM', { vocab_size: 16_384 })
  const table = buildModelTable(parseModelConfig(config), 1)
  const server = await cudaServer(t, config, { shadowWeights: true, shadowRate: 1e-6 })
  const mappings = async (): Promise<[opened: number, closed: number]> => [
    await server.metric('cuda_segments_opened_total'),
    await server.metric('cuda_segments_closed_total')
  ]
  const update = async (variant: number) => {
    const sent = sendModel(t, table, variant, { perSegment: 4 })
    const reply = await server.post(UPDATE, { serialized_named_tensors: [cudaEntry(sent.tensors)], swap: 'demand' })
    t.equal(sent.sender.held, 0, 'every handle was given back')
    return { ...reply, segments: sent.segments.length }
  }
  for (const variant of [1, 2]) {
    const [opened] = await mappings()
    const { status, body, segments } = await update(variant)
    t.equal(status, 200, JSON.stringify(body))
    t.ok(segments > 4)
    await checkVariant(t, server, table, variant)
    t.same(await mappings(), [opened + segments, opened + segments], 'each is opened and closed once')
  }
  for (const point of ['open', 'copy'] as const) {
    // In the middle of the slices, and beyond the first segment.
    native().armFault!({ point, at: point === 'open' ? 4 : 8, action: 'fail' })
    const { status, body } = await update(3)
    native().armFault!(null)
    t.ok(status >= 400, point)
    t.match(body.message, /injected fault/, point)
    await checkVariant(t, server, table, 2)
    const [opened, closed] = await mappings()
    t.equal(opened, closed, `${point}: nothing stays open`)
  }
  t.equal((await update(3)).status, 200)
  await checkVariant(t, server, table, 3)
})
