import { Type } from 'typebox'
import { RefitError } from '../../src/errors.ts'
import type { ServerContext, Routes } from '../../src/http/context.ts'
import { Adapter, toAdapter } from '../../src/http/updates/adapter-reply.ts'
import { OpenAiRefusal, refusals } from '../../src/http/schemas.ts'

const Model = Type.Object({
  id: Type.String(),
  object: Type.Literal('model'),
  created: Type.Integer(),
  owned_by: Type.String(),
  root: Type.String({ description: 'The path that the current weights were loaded from.' }),
  parent: Type.Union([Type.String(), Type.Null()], { description: 'Of an adapter: the base model.' }),
  max_model_len: Type.Integer(),
  weight_version: Type.String(),
  adapter: Type.Optional(Adapter)
}, { title: 'Model', description: 'The model, or a LoRA adapter.' })

const Models = Type.Object({ object: Type.Literal('list'), data: Type.Array(Model) }, {
  description: 'The model, then its LoRA adapters.'
})

/** OpenAI's list of models. */
const models: Routes<ServerContext> = async (app, { context }) => {
  const config = { auth: 'normal', errors: 'openai' } as const

  app.get('/v1/models', {
    config,
    schema: {
      operationId: 'listModels',
      summary: 'The models',
      tags: ['openai'],
      response: { 200: Models, ...refusals(OpenAiRefusal) }
    }
  }, async () => ({ object: 'list' as const, data: modelsOf(context) }))

  // A wildcard, because model names are often paths, and some clients do not escape slashes.
  app.get('/v1/models/*', {
    config,
    schema: {
      operationId: 'getModel',
      summary: 'A model',
      tags: ['openai'],
      params: Type.Object({ '*': Type.String() }),
      response: { 200: Model, ...refusals(OpenAiRefusal) }
    }
  }, async request => {
    const wanted = request.params['*']
    const models = modelsOf(context)
    const model = models.find(({ id, adapter }) => id === wanted && adapter !== undefined) ??
      models.find(({ id }) => id === wanted)
    if (model !== undefined) return model
    throw new RefitError(
      'NOT_FOUND',
      `there is no model ${JSON.stringify(wanted.slice(0, 200))}; the model is ${JSON.stringify(models[0]!.id)}`,
      { param: 'model' }
    )
  })
}

function modelsOf (context: ServerContext): Type.Static<typeof Model>[] {
  const base = modelOf(context)
  const adapters = context.engine.adapters?.list() ?? []
  return [
    base,
    ...adapters.map(info => ({
      ...base,
      id: info.name,
      root: info.path,
      parent: base.id,
      adapter: toAdapter(info)
    }))
  ]
}

function modelOf ({ engine, loaded, startedAt }: ServerContext): Type.Static<typeof Model> {
  return {
    id: engine.info.servedModelName,
    object: 'model',
    created: Math.floor(startedAt),
    owned_by: 'refit',
    root: loaded.modelPath,
    parent: null,
    max_model_len: engine.info.contextLength,
    weight_version: engine.weightVersion
  }
}

export default models
