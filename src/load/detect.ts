import { errorMessage, RefitError } from '../errors.ts'
import type { ApiName } from './api.ts'
import type { ServerConnection } from '../client/server-connection.ts'

/** A server, as far as it describes itself. */
export interface ServerFacts {
  /** refit, SGLang, vLLM, or OpenAI for any other with its routes. */
  kind: 'refit' | 'sglang' | 'vllm' | 'openai'
  version: string | null
  model: string
  vocabulary: number | null
  weightVersion: string | null
  api: ApiName
}

/**
 * Asks the server what it is. Without `wanted`: /generate of refit and SGLang, /v1/completions with vLLM's fields, or
 * OpenAI's chat. Throws ENGINE_FAILED if nothing answers or no model is known.
 */
export async function detectServer (
  connection: ServerConnection,
  { url, api, model }: { url: string, api: ApiName | null, model: string | null }
): Promise<ServerFacts> {
  try {
    const models = await connection.getJson('/v1/models')
    const first = models?.data?.[0]
    const found = await identify(connection, first?.owned_by)
    const name = model ?? first?.id ?? found.model
    if (typeof name !== 'string') {
      throw new RefitError('ENGINE_FAILED', `${url} lists no model at /v1/models: name one with --model`)
    }
    return { ...found, model: name, api: api ?? DEFAULT_API[found.kind] }
  } catch (error) {
    if (error instanceof RefitError) throw error
    throw new RefitError('ENGINE_FAILED', `${url} cannot be reached: ${errorMessage(error)}`, { cause: error })
  }
}

const DEFAULT_API = { refit: 'sglang', sglang: 'sglang', vllm: 'vllm', openai: 'chat' } as const

async function identify (
  connection: ServerConnection,
  owner: unknown
): Promise<Omit<ServerFacts, 'api' | 'model'> & { model: string | undefined }> {
  const capabilities = owner === 'vllm' ? undefined : await connection.getJson('/capabilities')
  if (capabilities?.server === 'refit') {
    const info = await connection.getJson('/model_info')
    return {
      kind: 'refit',
      version: text(capabilities.version),
      model: info?.model_path,
      vocabulary: capabilities.model?.vocab_size ?? null,
      weightVersion: text(info?.weight_version)
    }
  }
  if (owner !== 'vllm') {
    const info = await connection.getJson('/model_info') ?? await connection.getJson('/get_model_info')
    if (typeof info?.model_path === 'string') {
      const server = await connection.getJson('/server_info') ?? await connection.getJson('/get_server_info')
      return {
        kind: 'sglang',
        version: text(server?.version),
        model: info.model_path,
        vocabulary: typeof info.vocab_size === 'number' ? info.vocab_size : null,
        weightVersion: text(info.weight_version)
      }
    }
  }
  const version = await connection.getJson('/version')
  const kind = owner === 'vllm' || typeof version?.version === 'string' ? 'vllm' : 'openai'
  return { kind, version: text(version?.version), model: undefined, vocabulary: null, weightVersion: null }
}

function text (value: unknown): string | null {
  return typeof value === 'string' ? value : null
}
