import type { Connection } from './connection.ts'
import { RefitError } from '../errors.ts'

/** The program behind an engine's address. */
export type EngineKind = 'refit' | 'sglang' | 'vllm'

/** The facts that an engine reports about itself. */
export interface EngineFacts {
  kind: EngineKind
  /** Ranks that it has in a process group: one for each GPU. */
  ranks: number
  /** Label of its weights; null if it has none. */
  version: string | null
  /** Why its weights cannot be used: a part of them is torn. */
  torn: string | null
  /** Changes when the engine is restarted; null if the engine reports nothing of the kind. */
  instance: string | null
  /** The place that its weights were loaded from. */
  modelPath: string | null
  /** All other fields of its replies. */
  details: Readonly<Record<string, unknown>>
}

interface EngineRoutes {
  /** A GET that only engines of this kind reply to. */
  probe: string
  matches: (body: Record<string, unknown>) => boolean
  read: (
    connection: Connection,
    probed: Record<string, unknown>,
    signal: AbortSignal | undefined
  ) => Promise<Omit<EngineFacts, 'kind'>>
  /** A GET that replies within milliseconds while the engine runs. */
  alive: string
  /** Whether `instance` changes with every restart. */
  showsRestart: boolean
  /** The POST that ends a pause. */
  resume: string
  /** Whether /weights_checker returns checksums that two engines can be compared by. */
  hasChecksums: boolean
}

/** In the order in which they are tried. */
export const ENGINE_KINDS: Readonly<Record<EngineKind, EngineRoutes>> = {
  refit: {
    probe: '/capabilities',
    matches: ({ server }) => server === 'refit',
    read: async (connection, capabilities, signal) => {
      const info = await getObject(connection, '/server_info', signal)
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
    showsRestart: true,
    resume: '/continue_generation',
    hasChecksums: true
  },
  sglang: {
    probe: '/server_info',
    matches: body => 'tp_size' in body || 'tensor_parallel_size' in body,
    read: async (connection, probed, signal) => {
      const model = await getObject(connection, '/model_info', signal).catch(async () =>
        await getObject(connection, '/get_model_info', signal)
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
    // Older versions report no start time, and a seed that the user chose survives a restart.
    showsRestart: false,
    resume: '/continue_generation',
    hasChecksums: true
  },
  vllm: {
    probe: '/version',
    matches: body => typeof body['version'] === 'string',
    read: async (connection, probed, signal) => {
      const optional = async (path: string): Promise<Record<string, unknown>> =>
        await getObject(connection, path, signal).catch(() => ({}))
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
    showsRestart: false,
    resume: '/resume',
    hasChecksums: false
  }
}

/**
 * Finds out which kind of engine replies there, or reads the facts of a known kind. Throws ENGINE_FAILED with its
 * replies otherwise.
 */
export async function readFacts (
  connection: Connection,
  known: EngineKind | null = null,
  signal?: AbortSignal
): Promise<EngineFacts> {
  const replies: string[] = []
  for (const [kind, { probe, matches, read }] of Object.entries(ENGINE_KINDS) as [EngineKind, EngineRoutes][]) {
    if (known !== null && kind !== known) continue
    const reply = await connection.json('GET', probe, undefined, { ...signal === undefined ? {} : { signal } })
    if (reply.status === 401 || reply.status === 403) {
      throw failed(connection, `${probe} wants a key (status ${reply.status}): name it`)
    }
    if (reply.status === 508) throw failed(connection, 'leads back to this gateway: it is no engine')
    if (reply.status < 400 && isObject(reply.body) && matches(reply.body)) {
      return { kind, ...await read(connection, reply.body, signal) }
    }
    replies.push(`${probe} answered ${reply.status}`)
  }
  throw failed(connection, `is no engine of a known kind (refit, SGLang, vLLM): ${replies.join(', ')}`)
}

async function getObject (
  connection: Connection,
  path: string,
  signal: AbortSignal | undefined
): Promise<Record<string, unknown>> {
  const reply = await connection.json('GET', path, undefined, { ...signal === undefined ? {} : { signal } })
  if (reply.status < 400 && isObject(reply.body)) return reply.body
  // Not its text: whoever may name an address would read the replies of any service there.
  throw failed(
    connection,
    `GET ${path} answered ${reply.status}${reply.body === undefined ? ', which is no JSON' : ''}`
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
