import { loadAdapterFromIpc } from '../../src/dialects/checkpoint-engine/checkpoint-engine.ts'
import { refusals } from '../../src/http/schemas.ts'
import { IpcAdapterBody } from '../../src/http/updates/adapter-body.ts'
import {
  AdapterRefusal,
  logAdapter,
  SGLANG_STATUSES,
  SglangAdapters,
  toSglangAdapters
} from '../../src/http/updates/adapter-reply.ts'
import { adapterRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'
import { requireAdapters } from '../../src/updates/adapter-load.ts'

/** LoRA adapters that verl's workers send to vLLM's, as they send weights. */
const loraIpc: UpdateRoutes = async (app, { context }) => {
  adapterRoute(app, context, '/load_lora_adapter_from_ipc', {
    config: { errors: 'lora', statuses: SGLANG_STATUSES },
    schema: {
      operationId: 'loadLoraAdapterFromIpc',
      summary: 'Load a LoRA adapter from buckets behind ZeroMQ sockets',
      description: "verl's workers send them (docs/trainers/verl.md). Until the last bucket has come, the version " +
        'before stays; the buckets of a refused adapter are received and dropped before the reply.',
      tags: ['adapters'],
      body: IpcAdapterBody,
      response: { 200: SglangAdapters, ...refusals(AdapterRefusal) }
    }
  }, async ({ body, log }) => {
    const { lora_name: name, config_dict: config, zmq_handles: handles, pinned, upsert, timeout } = body
    const adapter = { name, config, pinned: pinned ?? false, existing: upsert === true ? 'replace' : 'refuse' } as const
    const report = await loadAdapterFromIpc(context, handles, adapter, timeout)
    logAdapter(log, report)
    return toSglangAdapters(requireAdapters(context.engine), report)
  })
}

export default loraIpc
