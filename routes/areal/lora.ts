import type { FastifyBaseLogger } from 'fastify'
import { Type } from 'typebox'
import type { Static } from 'typebox'
import type { ArealLoad } from '../../src/dialects/areal/adapters.ts'
import { ArealAdapter, arealAdaptersOf } from '../../src/dialects/areal/adapters.ts'
import { nullable, unused } from '../../src/http/schemas.ts'
import { AdapterName, adapterPath } from '../../src/http/updates/adapter-body.ts'
import { AdapterLoaded, logAdapter, SGLANG_STATUSES, toAdapterReport } from '../../src/http/updates/adapter-reply.ts'
import { adapterRoute, weightsRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'
import { ofAdapter, requireAdapters } from '../../src/updates/adapter-load.ts'
import { done, Done, schema } from './reply.ts'

const DiskBody = Type.Object({
  lora_model_path: adapterPath,
  lora_name: AdapterName,
  lora_int_id: Type.Integer({ description: 'The adapter that was loaded under this number before is unloaded.' }),
  base_model_name: nullable(Type.String()),
  load_format: unused(),
  abort_all_requests: unused('Requests that run finish on their version.')
}, { title: 'ArealDiskAdapterRequest' })

const adapterSchema = { ...schema, tags: ['adapters'] }
const Loaded = Type.Object({
  ...Done.properties,
  adapter: Type.Optional(AdapterLoaded),
  unloaded_adapter: Type.Optional(Type.String({ description: 'The name that had the same lora_int_id before.' }))
}, { title: 'ArealAdapterReply', description: 'Done. Without `adapter`, other parts of it are still to come.' })
const loadSchema = { ...adapterSchema, response: { ...schema.response, 200: Loaded } }
// AReaL's own server has no other status.
const config = { statuses: SGLANG_STATUSES }

/** AReaL's routes for LoRA adapters, besides those of vLLM and SGLang. */
const arealLora: UpdateRoutes = async (app, { context }) => {
  const { engine } = context
  const adapters = arealAdaptersOf(context)

  weightsRoute(app, '/areal_set_update_weight_meta_lora', {
    config,
    refuse: async (body, error) => await adapters.refuse(body, error),
    schema: {
      ...adapterSchema,
      operationId: 'arealSetUpdateWeightMetaLora',
      summary: 'Announce a LoRA adapter',
      description: 'Counts for one /areal_update_weights_lora_xccl.',
      body: ArealAdapter
    }
  }, async ({ body }) => {
    try {
      requireAdapters(engine)
      adapters.announce(body)
    } catch (error) {
      throw await adapters.refuse(body, ofAdapter(body.lora_name, error) as Error)
    }
    return done(engine.info.ranks)
  })

  adapterRoute(app, context, '/areal_update_weights_lora_xccl', {
    config,
    schema: {
      ...loadSchema,
      operationId: 'arealUpdateWeightsLoraXccl',
      summary: 'Receive the announced LoRA adapter, or a part of it',
      description: 'It is loaded once all modules that its configuration targets have come: AReaL sends one part for ' +
        'each pipeline stage. The adapter that was loaded under the same lora_int_id before is unloaded then. A ' +
        'refused one is received and dropped first.',
      body: Type.Any({ description: 'AReaL sends the announcement again; it is not read.' })
    }
  }, async ({ log }) => reply(await adapters.receive(), log))

  adapterRoute(app, context, '/areal_update_weights_lora', {
    config,
    schema: {
      ...loadSchema,
      operationId: 'arealUpdateWeightsLora',
      summary: 'Load a LoRA adapter from a folder (AReaL)',
      description: 'The adapter that was loaded under the same lora_int_id before is unloaded.',
      body: DiskBody
    }
  }, async ({ body, log }) => reply(await adapters.load(body), log))

  function reply ({ report, missing, unloaded }: ArealLoad, log: FastifyBaseLogger): Static<typeof Loaded> {
    if (report === null) {
      const message = `a part of a LoRA adapter has come, and ${missing.length} modules are still to come, such as ` +
        `${missing[0]}; it is loaded with the last one`
      log.info({ missing: missing.length }, message)
      return { success: true, message }
    }
    logAdapter(log, report)
    return {
      ...done(engine.info.ranks),
      adapter: toAdapterReport(report),
      ...unloaded === null ? {} : { unloaded_adapter: unloaded }
    }
  }
}

export default arealLora
