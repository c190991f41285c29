import { Type } from 'typebox'
import { RefitError } from '../../src/errors.ts'
import type { ServerContext, Routes } from '../../src/http/context.ts'
import { OpenAiRefusal, refusals } from '../../src/http/schemas.ts'

const Model = Type.Object({
  id: Type.String(),
  object: Type.Literal('model'),
  created: Type.Integer(),
  owned_by: Type.String(),
  root: Type.String({ description: 'The path that the current weights were loaded from.' }),
  parent: Type.Null(),
  max_model_len: Type.Integer(),
  weight_version: Type.String()
}, { title: 'Model', description: 'The model.' })

const Models = Type.Object({ object: Type.Literal('list'), data: Type.Array(Model) }, { description: 'The one model.' })

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
  }, async () => ({ object: 'list' as const, data: [modelOf(context)] }))

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
    const model = modelOf(context)
    if (wanted !== model.id) {
      throw new RefitError(
        'NOT_FOUND',
        `there is no model ${JSON.stringify(wanted.slice(0, 200))}; the model is ${JSON.stringify(model.id)}`,
        { param: 'model' }
      )
    }
    return model
  })
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
