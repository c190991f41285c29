import { BORROWED_HEADER } from '../../src/http/borrowed-header.ts'
import type { UpdatesContext } from '../../src/http/context.ts'
import { TENSOR_BODY_LIMIT } from '../../src/http/limits.ts'
import { invalid, isSet } from '../../src/http/refuse.ts'
import { refusals } from '../../src/http/schemas.ts'
import {
  adapterEntries,
  DiskAdapterBody,
  GroupAdapterBody,
  TensorAdapterBody,
  UnloadAdapterBody
} from '../../src/http/updates/adapter-body.ts'
import {
  AdapterRefusal,
  logAdapter,
  SGLANG_STATUSES,
  SglangAdapters,
  toSglangAdapters
} from '../../src/http/updates/adapter-reply.ts'
import { adapterRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateApp, UpdateRoutes } from '../../src/http/updates/update-route.ts'
import {
  loadAdapterFromDisk,
  loadAdapterFromGroup,
  loadAdapterFromTensors,
  requireAdapters,
  unloadAdapter,
  withNote
} from '../../src/updates/adapter-load.ts'
import { GROUP_NAME } from '../../src/updates/distributed-update.ts'

const config = { errors: 'lora', statuses: SGLANG_STATUSES } as const
const common = { tags: ['adapters'], response: { 200: SglangAdapters, ...refusals(AdapterRefusal) } }

/** SGLang's routes for LoRA adapters; prime-rl's own server has the first one too. */
const lora: UpdateRoutes = async (app, { context }) => {
  const { engine, dialects } = context

  adapterRoute(app, context, '/load_lora_adapter', {
    config,
    schema: {
      ...common,
      operationId: 'loadLoraAdapter',
      summary: 'Load a LoRA adapter from a folder',
      description: 'Generation goes on. Requests that run finish on the version that they began with.',
      body: DiskAdapterBody
    }
  }, async ({ body, log }) => {
    const { lora_name: name, lora_path: path, pinned, load_inplace: inPlace } = body
    const existing = inPlace ?? dialects.has('prime-rl') ? 'replace' : 'refuse'
    const report = await loadAdapterFromDisk(context, { name, path, pinned: pinned ?? false, existing })
    logAdapter(log, report)
    return toSglangAdapters(requireAdapters(engine), report)
  })

  adapterRoute(app, context, '/unload_lora_adapter', {
    config,
    schema: {
      ...common,
      operationId: 'unloadLoraAdapter',
      summary: 'Unload a LoRA adapter',
      description: 'New requests for it are refused from now on; running ones finish, and the reply does not wait.',
      body: UnloadAdapterBody
    }
  }, async ({ body, log }) => {
    const { name, version } = await unloadAdapter(context, body.lora_name)
    log.info({ adapter: name, version }, 'LoRA adapter unloaded')
    return toSglangAdapters(requireAdapters(engine))
  })

  tensorRoutes(app, context)
}

function tensorRoutes (app: UpdateApp, context: UpdatesContext): void {
  adapterRoute(app, context, '/load_lora_adapter_from_tensors', {
    config,
    bodyLimit: TENSOR_BODY_LIMIT,
    refuse: async (body, error, headers) => {
      if (!(BORROWED_HEADER in headers)) await context.tensors.discard(adapterEntries(body))
      return error
    },
    schema: {
      ...common,
      operationId: 'loadLoraAdapterFromTensors',
      summary: 'Load a LoRA adapter from tensors in the memory of a torch process',
      description: 'Handles are given back before any reply, unless they are kept.',
      body: TensorAdapterBody
    }
  }, async ({ body, headers, log }) => {
    const entries = adapterEntries(body)
    const borrowed = BORROWED_HEADER in headers
    const { expected_checksums: checksums, keep, kept } = body
    const refusal = entries.length === 0 && kept == null
      ? invalid('serialized_named_tensors', 'is required')
      : addedTokens(body.added_tokens_config)
    if (refusal !== undefined) {
      if (!borrowed) await context.tensors.discard(entries)
      throw refusal
    }
    const report = await loadAdapterFromTensors(context, {
      name: body.lora_name,
      config: body.config_dict,
      entries,
      loadFormat: body.load_format ?? null,
      pinned: body.pinned ?? false,
      existing: body.upsert === true ? 'replace' : 'refuse',
      checksums,
      keep,
      kept,
      borrowed
    })
    logAdapter(log, report)
    const reply = toSglangAdapters(requireAdapters(context.engine), report)
    return checksums == null ? reply : { ...reply, checksums_verified: true }
  })

  adapterRoute(app, context, '/load_lora_adapter_from_distributed', {
    config,
    // The trainer broadcasts even if a field is invalid.
    refuse: async (body, error) => withNote(error, await context.distributed.refuse(body, GROUP_NAME)) as Error,
    schema: {
      ...common,
      operationId: 'loadLoraAdapterFromDistributed',
      summary: "Load a LoRA adapter from a trainer's broadcasts",
      description:
        'One broadcast of rank 0 for each tensor, in the order of `names`. The tensors of a refused request ' +
        'are received and dropped before the reply.',
      body: GroupAdapterBody
    }
  }, async ({ body, log }) => {
    const refusal = addedTokens(body.added_tokens_config)
    if (refusal !== undefined) throw withNote(refusal, await context.distributed.refuse(body, GROUP_NAME))
    const { names, dtypes, shapes, group_name: groupName, expected_checksums: checksums } = body
    const report = await loadAdapterFromGroup(context, {
      name: body.lora_name,
      config: body.config_dict,
      names,
      dtypes,
      shapes,
      groupName: groupName ?? undefined,
      loadFormat: body.load_format ?? null,
      pinned: body.pinned ?? false,
      existing: body.upsert === true ? 'replace' : 'refuse',
      checksums
    })
    logAdapter(log, report)
    const reply = toSglangAdapters(requireAdapters(context.engine), report)
    return checksums == null ? reply : { ...reply, checksums_verified: true }
  })
}

function addedTokens (tokens: unknown): Error | undefined {
  return isSet(tokens) ? invalid('added_tokens_config', 'adapters that add tokens are not supported') : undefined
}

export default lora
