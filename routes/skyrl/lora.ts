import { Type } from 'typebox'
import { OpenAiRefusal, refusals } from '../../src/http/schemas.ts'
import { AdapterName, adapterPath } from '../../src/http/updates/adapter-body.ts'
import { AdapterLoaded, logAdapter, toAdapterReport, VLLM_STATUSES } from '../../src/http/updates/adapter-reply.ts'
import { adapterRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'
import { loadAdapterFromDisk } from '../../src/updates/adapter-load.ts'

const Body = Type.Object({ lora_name: AdapterName, lora_path: adapterPath }, { title: 'SkyrlLoadAdapterRequest' })
const Loaded = Type.Object({
  status: Type.Literal('ok'),
  lora_name: Type.String(),
  lora_int_id: Type.Integer({ description: 'The version.' }),
  adapter: AdapterLoaded
}, { title: 'SkyrlAdapterReply', description: 'New requests use this version.' })

/** SkyRL's route for LoRA adapters: the same name and folder each time, replaced in place. */
const skyrlLora: UpdateRoutes = async (app, { context }) => {
  adapterRoute(app, context, '/skyrl/v1/load_lora_adapter', {
    config: { errors: 'openai', statuses: VLLM_STATUSES },
    schema: {
      operationId: 'loadLoraAdapterSkyrl',
      summary: 'Load or replace a LoRA adapter from a folder (SkyRL)',
      description: 'As /v1/load_lora_adapter with `load_inplace`.',
      tags: ['adapters'],
      body: Body,
      response: { 200: Loaded, ...refusals(OpenAiRefusal) }
    }
  }, async ({ body: { lora_name: name, lora_path: path }, log }) => {
    const report = await loadAdapterFromDisk(context, { name, path })
    logAdapter(log, report)
    return {
      status: 'ok' as const,
      lora_name: name,
      lora_int_id: report.version,
      adapter: toAdapterReport(report)
    }
  })
}

export default skyrlLora
