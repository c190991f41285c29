import { Type } from 'typebox'
import { nullable, OpenAiRefusal, refusals } from '../../src/http/schemas.ts'
import { AdapterName, adapterPath, UnloadAdapterBody } from '../../src/http/updates/adapter-body.ts'
import { logAdapter, VLLM_STATUSES } from '../../src/http/updates/adapter-reply.ts'
import { adapterRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'
import { loadAdapterFromDisk, unloadAdapter } from '../../src/updates/adapter-load.ts'

const LoadBody = Type.Object({
  lora_name: AdapterName,
  lora_path: adapterPath,
  load_inplace: nullable(
    Type.Boolean(),
    'A name that is loaded already gets the new version: requests that run finish on theirs (default false: 400).'
  ),
  is_3d_lora_weight: nullable(Type.Boolean(), 'Has no effect: the layout of experts is read from the tensors.'),
  base_model_name: nullable(Type.String(), 'Has no effect: there is one base model.')
}, { title: 'VllmLoadAdapterRequest' })

const Text = { description: 'Done.', content: { 'text/plain': { schema: Type.String() } } }
const config = { errors: 'openai', statuses: VLLM_STATUSES } as const
const common = { tags: ['adapters'], response: { 200: Text, ...refusals(OpenAiRefusal) } }
const TEXT = 'text/plain; charset=utf-8'

/** vLLM's routes for LoRA adapters. Its flag for them (VLLM_ALLOW_RUNTIME_LORA_UPDATING) is not needed. */
const vllmLora: UpdateRoutes = async (app, { context }) => {
  adapterRoute(app, context, '/v1/load_lora_adapter', {
    config,
    schema: {
      ...common,
      operationId: 'loadLoraAdapterV1',
      summary: 'Load a LoRA adapter from a folder (vLLM)',
      description: 'As /load_lora_adapter. Requests choose it by `model`.',
      body: LoadBody
    }
  }, async ({ body, log }, reply) => {
    const { lora_name: name, lora_path: path, load_inplace: inPlace } = body
    const report = await loadAdapterFromDisk(context, { name, path, existing: inPlace === true ? 'replace' : 'refuse' })
    logAdapter(log, report)
    return await reply.type(TEXT).send(`Success: LoRA adapter '${name}' added successfully.`)
  })

  adapterRoute(app, context, '/v1/unload_lora_adapter', {
    config,
    schema: {
      ...common,
      operationId: 'unloadLoraAdapterV1',
      summary: 'Unload a LoRA adapter (vLLM)',
      description: 'As /unload_lora_adapter.',
      body: UnloadAdapterBody
    }
  }, async ({ body, log }, reply) => {
    const { name, version } = await unloadAdapter(context, body.lora_name)
    log.info({ adapter: name, version }, 'LoRA adapter unloaded')
    return await reply.type(TEXT).send(`Success: LoRA adapter '${name}' removed successfully.`)
  })
}

export default vllmLora
