import swagger from '@fastify/swagger'
import Fastify from 'fastify'
import type { FastifyInstance, FastifySchema } from 'fastify'
import type { EngineInfo, RolloutEngine } from '../contract/rollout-engine.ts'
import { UploadFields } from '../http/upload/upload-fields.ts'
import { BYTES, FORM } from '../http/upload/upload-types.ts'
import { packageVersion } from '../http/version.ts'
import refit from './plugin.ts'

const TAGS = [
  { name: 'generation', description: "SGLang's native generation endpoint." },
  { name: 'openai', description: 'Endpoints of the OpenAI API.' },
  { name: 'text', description: 'Text to token ids and back.' },
  { name: 'weights', description: 'Reading, checking and replacing weights. Admin key, if there is one.' },
  { name: 'adapters', description: 'Loading, listing and unloading LoRA adapters. Admin key for changes.' },
  { name: 'control', description: 'Cache, pause and abort. Admin key, if there is one.' },
  { name: 'health', description: 'Is it alive, is it ready, does it generate.' },
  { name: 'info', description: 'What the server is and how busy it is.' }
]

/**
 * Collects the routes that are registered after it; `app.swagger()` then returns the document of openapi/openapi.json.
 */
export async function describeApi (
  app: FastifyInstance,
  {
    title = 'refit',
    description = 'A rollout server for RL training whose weights can be replaced while it runs.',
    tags = TAGS
  } = {}
): Promise<void> {
  await app.register(swagger, {
    openapi: {
      openapi: '3.1.0',
      info: {
        title,
        version: packageVersion(),
        description,
        license: { name: 'Apache-2.0', identifier: 'Apache-2.0' }
      },
      servers: [{ url: 'http://127.0.0.1:30000', description: 'The default address.' }],
      tags,
      components: {
        securitySchemes: {
          key: {
            type: 'http',
            scheme: 'bearer',
            description: 'The API key, or the admin key on routes that change weights or the state of the engine.'
          }
        }
      }
    },
    refResolver: {
      buildLocalReference: (json, _base, _fragment, i) => typeof json['$id'] === 'string' ? json['$id'] : `def-${i}`
    },
    transform: ({ schema, url, route }) => {
      // An empty requirement beside the key: a server without keys requires none.
      const security: Record<string, string[]>[] = route.config?.auth === 'public' ? [] : [{ key: [] }, {}]
      const described = route.config?.uploads === true ? withUploads(schema) : schema
      return { schema: { ...named(described, url), security }, url: url.replace('*', ':name') }
    },
    transformObject: document => {
      if (!('openapiObject' in document)) return document.swaggerObject
      const { openapiObject } = document
      const schemas: Record<string, unknown> = {}
      openapiObject.paths = share(openapiObject.paths, schemas) as typeof openapiObject.paths
      openapiObject.components = { ...openapiObject.components, schemas: schemas as never }
      return openapiObject
    }
  })
}

/** Uploads besides JSON: their fields in the query or in the form. */
function withUploads (schema: FastifySchema): FastifySchema {
  const { properties } = UploadFields
  // `format` is from OpenAPI 3.0: with it, generators give bytes a type of their own.
  const bytes = { type: 'string', format: 'binary', contentMediaType: BYTES }
  const file = {
    type: 'array',
    items: bytes,
    description: 'Safetensors files, and their index if there is one; each is a part of the form.'
  }
  // An adapter comes only as a form, and its route has a query of its own.
  if (schema.body === undefined) {
    const own = { file: { ...file, description: 'adapter_config.json and adapter_model.safetensors, each a part.' } }
    return { ...schema, body: { content: { [FORM]: { schema: { type: 'object', properties: own } } } } }
  }
  const content = {
    'application/json': { schema: schema.body },
    [FORM]: { schema: { type: 'object', properties: { ...properties, file } } },
    [BYTES]: { schema: { ...bytes, description: 'One safetensors file; fields in the query.' } }
  }
  return { ...schema, body: { content }, querystring: { type: 'object', properties } }
}

/** OpenAPI has no wildcards, so the rest of the path becomes a parameter. */
function named (schema: FastifySchema, url: string): FastifySchema {
  if (!url.includes('*') || schema.params === undefined) return schema
  const { properties } = schema.params as { properties: Record<string, object> }
  return { ...schema, params: { type: 'object', required: ['name'], properties: { name: properties['*'] } } }
}

/** Moves schemas with a title to the components, so that generated clients have types by those names. */
function share (value: unknown, schemas: Record<string, unknown>): unknown {
  if (typeof value !== 'object' || value === null) return value
  if (Array.isArray(value)) return value.map(item => share(item, schemas))
  const shared = Object.fromEntries(Object.entries(value).map(([key, item]) => [key, share(item, schemas)]))
  const { title } = shared as { title?: unknown }
  if (typeof title !== 'string') return shared
  delete shared['title']
  schemas[title] = shared
  return { $ref: `#/components/schemas/${title}` }
}

/** The document of this version's routes. It needs no engine: routes are declared, none is called. */
export async function openApiDocument (): Promise<object> {
  const app = Fastify()
  await describeApi(app)
  const engine = { info: { servedModelName: '', modelPath: '/', gpus: [] as EngineInfo['gpus'] } } as RolloutEngine
  await app.register(refit, { engine, tokenizer: null, ui: true })
  await app.ready()
  const document = app.swagger()
  await app.close()
  return document
}
