import { Type } from 'typebox'
import { TENSOR_BODY_LIMIT } from '../../src/http/limits.ts'
import { adapterEntries, adapterRefusal, AdapterRefusal } from '../../src/http/adapters.ts'
import { OpenAiRefusal, refusals } from '../../src/http/schemas.ts'
import { weightsRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'

const Body = Type.Any({ description: 'Any body. Handles of tensors in it are given back.' })

/** LoRA adapters, which refit does not apply: refused by name, in the form that the clients of each route expect. */
const lora: UpdateRoutes = async (app, { context }) => {
  const refuse = (
    path: string,
    operationId: string,
    errors: 'lora' | 'openai',
    reply: typeof AdapterRefusal | typeof OpenAiRefusal
  ): void => {
    weightsRoute(app, path, {
      config: { errors },
      bodyLimit: TENSOR_BODY_LIMIT,
      schema: {
        operationId,
        summary: 'Not supported: LoRA adapters',
        description: 'refit serves whole weights: merge the adapter into them and send those. ' +
          "The reply is always a refusal; the sender's handles have been given back before it.",
        tags: ['weights'],
        body: Body,
        // Every status is a refusal, so there is no success to describe.
        response: { ...refusals(reply), default: reply }
      }
    }, async request => {
      const entries = adapterEntries(request.body)
      if (entries.length > 0) await context.tensors.discard(entries)
      throw adapterRefusal(request.body)
    })
  }
  // SGLang's routes; prime-rl's own server has them too.
  refuse('/load_lora_adapter', 'loadLoraAdapter', 'lora', AdapterRefusal)
  refuse('/unload_lora_adapter', 'unloadLoraAdapter', 'lora', AdapterRefusal)
  refuse('/load_lora_adapter_from_tensors', 'loadLoraAdapterFromTensors', 'lora', AdapterRefusal)
  refuse('/load_lora_adapter_from_distributed', 'loadLoraAdapterFromDistributed', 'lora', AdapterRefusal)
  // vLLM's routes; SkyRL's server has them too.
  refuse('/v1/load_lora_adapter', 'loadLoraAdapterV1', 'openai', OpenAiRefusal)
  refuse('/v1/unload_lora_adapter', 'unloadLoraAdapterV1', 'openai', OpenAiRefusal)
  refuse('/skyrl/v1/load_lora_adapter', 'loadLoraAdapterSkyrl', 'openai', OpenAiRefusal)
}

export default lora
