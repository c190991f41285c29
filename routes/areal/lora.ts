import { Type } from 'typebox'
import { arealAdapterRefusal, arealBucketsOf } from '../../src/dialects/areal/areal.ts'
import { schema } from './reply.ts'
import { weightsRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'

const Adapter = Type.Any({ description: 'Any body that AReaL sends for an adapter.' })

/** AReaL's routes for LoRA adapters, which are refused. */
const arealLora: UpdateRoutes = async (app, { context }) => {
  const buckets = arealBucketsOf(context)

  for (
    const [path, operationId] of [['/areal_set_update_weight_meta_lora', 'arealSetUpdateWeightMetaLora'], [
      '/areal_update_weights_lora_xccl',
      'arealUpdateWeightsLoraXccl'
    ], ['/areal_update_weights_lora', 'arealUpdateWeightsLora']] as const
  ) {
    const isAnnounced = path === '/areal_set_update_weight_meta_lora'
    weightsRoute(app, path, {
      schema: {
        ...schema,
        operationId,
        summary: 'Not supported: LoRA adapters',
        description: isAnnounced
          ? 'The broadcast tensors are received and dropped before the refusal.'
          : 'Always refused.',
        body: Adapter
      }
    }, async request => {
      const body = (request.body as Record<string, unknown> | null) ?? {}
      throw isAnnounced ? await buckets.refuseAdapter(body) : arealAdapterRefusal(body)
    })
  }
}

export default arealLora
