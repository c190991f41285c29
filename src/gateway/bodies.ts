import { RefitError } from '../errors.ts'
import type { Fleet } from './fleet.ts'
import type { Worker } from './worker.ts'

type Fields = Record<string, unknown>

/** The body for each engine; null: the one that came. */
export type PerEngine = Map<Worker, Fields> | null

/**
 * What cannot be said to all engines alike: which ranks of a process group they are, and which of the handles are for their cards. Engines
 * count in the order of /workers, one rank after another.
 */
export function perEngine (fleet: Fleet, path: string, body: unknown, workers: readonly Worker[]): PerEngine {
  if (typeof body !== 'object' || body === null) return null
  const fields = body as Fields
  if (/\/(areal_)?init_weights_update_group$/.test(path)) return joined(fleet, fields, workers, ranked => ranked)
  if (path === '/init_weight_transfer_engine') {
    const info = fields['init_info']
    return typeof info === 'object' && info !== null ? joined(fleet, info as Fields, workers, ranked => ({ ...fields, init_info: ranked })) : null
  }
  return path === '/update_weights_from_tensor' ? split(fields, workers) : null
}

/** A group is given away only if all of its ranks can come: one that waits for a rank that is down waits in vain. */
function joined (fleet: Fleet, fields: Fields, workers: readonly Worker[], wrap: (ranked: Fields) => Fields): PerEngine {
  const { rank_offset: first, world_size: world } = fields
  if (!Number.isSafeInteger(first) || !Number.isSafeInteger(world)) return null
  const total = sum(workers)
  const missing = fleet.list.filter(worker => !workers.includes(worker) && worker.state !== 'draining')
  const layout = workers.map(({ url, ranks }) => `${url} has ${ranks}`).join(', ')
  if ((first as number) + total > (world as number)) {
    throw new RefitError('INVALID_REQUEST', `world_size: ranks from rank_offset ${String(first)} on are ${total} (${layout}), which ${String(world)} has no room for; read tp_size of /server_info again`, { param: 'world_size' })
  }
  if (missing.length > 0 && (first as number) + total + sum(missing) <= (world as number)) {
    throw new RefitError('NO_ENGINE', `the group would wait for ranks that do not come: ${missing.map(({ url, state }) => `${url} is ${state}`).join(', ')}`)
  }
  let rank = first as number
  return new Map(workers.map(worker => {
    const ranked = wrap({ ...fields, rank_offset: rank })
    rank += worker.ranks
    return [worker, ranked]
  }))
}

/** One entry for each rank of all engines: each gets those of its ranks. Other lists are the same for all engines. */
function split (fields: Fields, workers: readonly Worker[]): PerEngine {
  const entries = fields['serialized_named_tensors']
  if (!Array.isArray(entries) || workers.length < 2 || entries.length !== sum(workers)) return null
  let rank = 0
  return new Map(workers.map(worker => {
    const own = entries.slice(rank, rank + worker.ranks)
    rank += worker.ranks
    return [worker, { ...fields, serialized_named_tensors: own }]
  }))
}

function sum (workers: readonly Worker[]): number { return workers.reduce((total, { ranks }) => total + ranks, 0) }
