import { Readable } from 'node:stream'
import { Type } from 'typebox'
import { RefitError } from '../../src/errors.ts'
import type { UpdatesContext } from '../../src/http/context.ts'
import { nullable, refusals, WeightsRefusal } from '../../src/http/schemas.ts'
import { Adapter, AdapterLoaded, logAdapter, toAdapter, toAdapterReport } from '../../src/http/updates/adapter-reply.ts'
import { adapterRoute, deleteRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateApp, UpdateRoutes } from '../../src/http/updates/update-route.ts'
import { heldForm } from '../../src/http/upload/held-form.ts'
import { loadAdapterFromForm } from '../../src/http/upload/adapter-upload.ts'
import { takesForms } from '../../src/http/upload/form-parser.ts'
import { requireAdapters, unloadAdapter } from '../../src/updates/adapter-load.ts'

// Names may have slashes, and some clients do not escape them.
const Params = Type.Object({ '*': Type.String({ minLength: 1 }) })
const strict = { additionalProperties: false } as const

const LoadQuery = Type.Object({
  existing: nullable(
    Type.Union([Type.Literal('replace'), Type.Literal('refuse')]),
    'A name that is loaded already gets the new version (default), or 409.'
  ),
  pinned: nullable(Type.Boolean(), 'Keeps it in its slot (default false).')
}, strict)

const UnloadQuery = Type.Object({
  in_use: nullable(
    Type.Union([Type.Literal('finish'), Type.Literal('wait'), Type.Literal('refuse')]),
    'While requests use it: they finish and the reply comes at once (default), the reply comes when they have ' +
      'finished, or 409.'
  )
}, strict)

const Limits = Type.Object({
  slots: Type.Integer({ description: 'Versions that running requests use at once (--max-loras).' }),
  max_rank: Type.Integer(),
  max_loaded: Type.Integer(),
  target_modules: Type.Array(Type.String())
}, { title: 'AdapterLimits' })

const read = { auth: 'normal', errors: 'weights' } as const

/** refit's own routes for LoRA adapters. */
const adapters: UpdateRoutes = async (app, { context }) => {
  const { engine } = context

  app.get('/adapters', {
    config: read,
    schema: {
      operationId: 'adapters',
      summary: 'The LoRA adapters',
      tags: ['adapters'],
      response: {
        200: Type.Object({ limits: Limits, adapters: Type.Array(Adapter) }, { description: 'In order of first load.' }),
        ...refusals(WeightsRefusal)
      }
    }
  }, async () => {
    const held = requireAdapters(engine)
    const { slots, maxRank, maxLoaded, targets } = held.limits
    return {
      limits: { slots, max_rank: maxRank, max_loaded: maxLoaded, target_modules: [...targets] },
      adapters: held.list().map(toAdapter)
    }
  })

  oneAdapter(app, context)

  adapterRoute(app, context, '/adapters/*', {
    config: { uploads: true },
    schema: {
      operationId: 'loadAdapter',
      summary: 'Load a LoRA adapter from an upload',
      description: 'A form (multipart/form-data) with the files adapter_config.json and adapter_model.safetensors. ' +
        'Generation goes on; requests that run finish on the version that they began with.',
      tags: ['adapters'],
      params: Params,
      querystring: LoadQuery,
      response: { 200: AdapterLoaded, ...refusals(WeightsRefusal) }
    }
  }, async request => {
    const { existing, pinned } = request.query
    const report = await loadAdapterFromForm(context, request, {
      name: request.params['*'],
      existing: existing ?? 'replace',
      pinned: pinned ?? false
    })
    logAdapter(request.log, report)
    return toAdapterReport(report)
  })

  deleteRoute(app, '/adapters/*', {
    schema: {
      operationId: 'unloadAdapter',
      summary: 'Unload a LoRA adapter',
      description: 'New requests for it are refused from the call on.',
      tags: ['adapters'],
      params: Params,
      querystring: UnloadQuery,
      response: { 200: Adapter, ...refusals(WeightsRefusal) }
    }
  }, async ({ params, query, log }) => {
    const info = await unloadAdapter(context, params['*'], query.in_use ?? 'finish')
    log.info({ adapter: info.name, version: info.version }, 'LoRA adapter unloaded')
    return toAdapter(info)
  })
}

function oneAdapter (app: UpdateApp, { engine }: UpdatesContext): void {
  app.get('/adapters/*', {
    config: read,
    schema: {
      operationId: 'adapter',
      summary: 'A LoRA adapter',
      tags: ['adapters'],
      params: Params,
      response: { 200: Adapter, ...refusals(WeightsRefusal) }
    }
  }, async ({ params }) => {
    const info = requireAdapters(engine).get(params['*'])
    if (info !== undefined) return toAdapter(info)
    throw new RefitError('ADAPTER_UNKNOWN', `no LoRA adapter is named ${JSON.stringify(params['*'].slice(0, 200))}`, {
      param: 'name'
    })
  })

  app.get('/adapter_files/*', {
    config: { auth: 'admin', errors: 'weights' },
    schema: {
      operationId: 'adapterFiles',
      summary: 'Read a LoRA adapter',
      description: 'The form that POST /adapters/NAME takes. Ranks and scales are those of the version, tensors are ' +
        'as the engine holds them. The version stays in its slot until the reply has been read.',
      tags: ['adapters'],
      params: Params,
      response: {
        200: {
          description: 'adapter_config.json and adapter_model.safetensors.',
          content: { 'multipart/form-data': { schema: Type.Any() } }
        },
        ...refusals(WeightsRefusal)
      }
    }
  }, async ({ params }, reply) => {
    const { type, length, chunks } = await heldForm(requireAdapters(engine), params['*'], reply.raw)
    return await reply.type(type).header('content-length', length).send(Readable.from(chunks, { objectMode: false }))
  })
}

export default takesForms(adapters)
