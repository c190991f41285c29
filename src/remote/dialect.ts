import { messageOf } from './connection.ts'
import type { Connection, JsonReply } from './connection.ts'
import { RefitError } from '../errors.ts'

export type DialectName = 'refit' | 'sglang' | 'vllm'

/** What an engine says of itself. */
export interface EngineFacts {
  dialect: DialectName
  /** GPUs, or ranks of a process group, that it counts for. */
  ranks: number
  /** Label of its weights; null where it has none. */
  version: string | null
  /** Weights that are torn, in words. */
  torn: string | null
  /** Changes when the engine starts anew; null where it does not say. */
  instance: string | null
  /** Where its weights were loaded from. */
  modelPath: string | null
  /** Everything else that it answered with. */
  details: Readonly<Record<string, unknown>>
}

interface Dialect {
  /** Answered by engines of this dialect alone. */
  probe: string
  isSpoken: (body: Record<string, unknown>) => boolean
  read: (
    connection: Connection,
    probed: Record<string, unknown>,
    signal: AbortSignal | undefined
  ) => Promise<Omit<EngineFacts, 'dialect'>>
  /** GET that answers in milliseconds while the engine lives. */
  alive: string
  /** Whether every start has another `instance`. */
  tellsStart: boolean
  /** POST that ends a pause. */
  resume: string
  /** Whether /weights_checker gives checksums that two engines can be compared by. */
  hasChecksums: boolean
}

/** In the order in which they are tried. */
export const DIALECTS: Readonly<Record<DialectName, Dialect>> = {
  refit: {
    probe: '/capabilities',
    isSpoken: ({ server }) => server === 'refit',
    read: async (connection, capabilities, signal) => {
      const info = await demand(connection, '/server_info', signal)
      const torn = info['weights'] === 'torn' ? 'its weights are torn' : null
      return {
        ranks: count(info['tp_size']),
        version: text(info['weight_version']),
        torn,
        instance: String(info['started_at']),
        modelPath: text(info['model_path']),
        details: { ...info, capabilities }
      }
    },
    alive: '/health',
    tellsStart: true,
    resume: '/continue_generation',
    hasChecksums: true
  },
  sglang: {
    probe: '/server_info',
    isSpoken: body => 'tp_size' in body || 'tensor_parallel_size' in body,
    read: async (connection, probed, signal) => {
      const model = await demand(connection, '/model_info', signal).catch(async () =>
        await demand(connection, '/get_model_info', signal)
      )
      const ranks = probed['num_gpus'] === undefined
        ? count(probed['tp_size'] ?? probed['tensor_parallel_size']) * count(probed['pp_size'])
        : count(probed['num_gpus'])
      return {
        ranks,
        version: text(model['weight_version']),
        torn: null,
        instance: text(probed['start_time']) ?? text(probed['random_seed']),
        modelPath: text(model['model_path']),
        details: { ...probed, ...model }
      }
    },
    alive: '/health',
    // Its seed may have been chosen.
    tellsStart: false,
    resume: '/continue_generation',
    hasChecksums: true
  },
  vllm: {
    probe: '/version',
    isSpoken: body => typeof body['version'] === 'string',
    read: async (connection, probed, signal) => {
      const optional = async (path: string): Promise<Record<string, unknown>> =>
        await demand(connection, path, signal).catch(() => ({}))
      const [size, weights, models] = [
        await optional('/get_world_size'),
        await optional('/weight_info'),
        await optional('/v1/models')
      ]
      const model = (models['data'] as Record<string, unknown>[] | undefined)?.[0] ?? {}
      return {
        ranks: count(size['world_size']),
        version: text(weights['weight_version']),
        torn: null,
        instance: null,
        modelPath: text(model['root']) ?? text(model['id']),
        details: { ...probed, ...model }
      }
    },
    alive: '/health',
    tellsStart: false,
    resume: '/resume',
    hasChecksums: false
  }
}

/** Asks what speaks there. Throws ENGINE_FAILED where nothing that is known does, with what it answered. */
export async function readFacts (
  connection: Connection,
  known: DialectName | null = null,
  signal?: AbortSignal
): Promise<EngineFacts> {
  const heard: string[] = []
  for (const [name, { probe, isSpoken, read }] of Object.entries(DIALECTS) as [DialectName, Dialect][]) {
    if (known !== null && name !== known) continue
    const reply = await connection.json('GET', probe, undefined, { ...signal === undefined ? {} : { signal } })
    if (reply.status === 401 || reply.status === 403) {
      throw failed(connection, `${probe} wants a key (status ${reply.status}): name it`)
    }
    if (reply.status < 400 && isObject(reply.body) && isSpoken(reply.body)) {
      return {
        dialect: name,
        ...await read(connection, reply.body, signal)
      }
    }
    heard.push(`${probe} answered ${reply.status}`)
  }
  throw failed(connection, `speaks no dialect that is known (refit, SGLang, vLLM): ${heard.join(', ')}`)
}

async function demand (
  connection: Connection,
  path: string,
  signal: AbortSignal | undefined
): Promise<Record<string, unknown>> {
  const reply = await connection.json('GET', path, undefined, { ...signal === undefined ? {} : { signal } })
  if (reply.status < 400 && isObject(reply.body)) return reply.body
  throw failed(
    connection,
    `GET ${path} answered ${reply.status}${reply.body === undefined ? ', which is no JSON' : ''}: ${
      messageOf(reply as JsonReply).slice(0, 200)
    }`
  )
}

function failed ({ url }: Connection, message: string): RefitError {
  return new RefitError('ENGINE_FAILED', `${url} ${message}`)
}

function isObject (value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
}

function text (value: unknown): string | null {
  return typeof value === 'string' || typeof value === 'number' ? String(value) : null
}

function count (value: unknown): number {
  const number = Number(value ?? 1)
  return Number.isSafeInteger(number) && number > 0 ? number : 1
}
