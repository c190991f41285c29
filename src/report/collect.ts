import { errorMessage } from '../errors.ts'
import type { ServerConnection } from '../client/server-connection.ts'

/** One part of the report: what the server answered, or why there is none. */
export type Part = { path: string, reply: unknown } | { path: string, missing: string }

/** Facts about servers that have no /report. Other fields are left out: SGLang's contain its key. */
const SERVER_INFO = [
  'version',
  'model_path',
  'served_model_name',
  'load_format',
  'weight_version',
  'device',
  'dtype',
  'quantization',
  'tp_size',
  'dp_size',
  'pp_size',
  'ep_size',
  'context_length',
  'max_running_requests',
  'max_total_num_tokens',
  'attention_backend',
  'sampling_backend',
  'mem_fraction_static',
  'status',
  'enable_lora',
  'weight_groups',
  'released_memory',
  'weight_transaction',
  'started_at'
]
/** Samples of refit's own metrics, and none of its histograms' buckets. */
const METRIC = /^refit:(?!\S*_bucket)[^\n]*$/gm

/** Read with the admin key, if the server has one. */
const ADMIN = '/report'

type Reader = (connection: ServerConnection) => Promise<unknown>

const PARTS: readonly [path: string, read: Reader][] = [
  [ADMIN, async connection => await connection.getJson('/report')],
  ['/health', async connection => await connection.getJson('/health')],
  ['/updates', async connection => await connection.getJson('/updates')],
  ['/workers', async connection => await connection.getJson('/workers')],
  ['/version', async connection => await connection.getJson('/version')],
  ['/server_info', async connection => pick(await connection.getJson('/server_info'), SERVER_INFO)],
  ['/metrics', async connection => {
    const text = await connection.getText('/metrics')
    return text?.match(METRIC) ?? undefined
  }]
]

/** Reads everything that the server tells about itself. A part that fails is named, and the others are there. */
export async function collect (normal: ServerConnection, admin: ServerConnection): Promise<Part[]> {
  const parts: Part[] = []
  for (const [path, read] of PARTS) {
    try {
      const reply = await read(path === ADMIN ? admin : normal)
      parts.push(reply === undefined ? { path, missing: 'not offered' } : { path, reply })
    } catch (error) {
      parts.push({ path, missing: errorMessage(error) })
    }
  }
  return parts
}

function pick (reply: unknown, names: readonly string[]): unknown {
  if (typeof reply !== 'object' || reply === null) return undefined
  return Object.fromEntries(Object.entries(reply).filter(([name]) => names.includes(name)))
}
