import { randomUUID } from 'node:crypto'
import { RefitError } from '../errors.ts'
import type { GatewayCall, RankFields } from './gateway-call.ts'
import type { Fleet } from './fleet.ts'
import type { Edit, JsonBody, Pieces, Step } from './json-body.ts'
import type { Worker } from './worker.ts'

/** The body for each engine; null: the one that came. */
export type PerEngine = ReadonlyMap<Worker, Pieces> | null

/**
 * What cannot be said to all engines alike: which ranks of a process group they are, and which of the handles are for their cards. Engines
 * count in the order of /workers, one rank after another. All other bytes stay as they came.
 */
export function perEngine (fleet: Fleet, call: GatewayCall, body: JsonBody, workers: readonly Worker[]): PerEngine {
  if (call.ranks !== undefined) return joined(fleet, call.ranks, body, workers)
  if (call.perRank !== undefined) return cut(call.perRank, body, workers)
  if (call.sharesId !== true || body.has('id')) return null
  const id = JSON.stringify(randomUUID())
  // Of a name that comes twice the last one counts.
  const named = body.get('id') === null ? body.with([{ at: ['id'], value: id }]) : body.withMember('id', id)
  return named === null ? null : new Map(workers.map(worker => [worker, named]))
}

/** A group is given away only if all of its ranks can come: one that waits for a rank that is down waits in vain. */
function joined (
  fleet: Fleet,
  { at, offset, world: worldField }: RankFields,
  body: JsonBody,
  workers: readonly Worker[]
): PerEngine {
  const [first, world] = [whole(body.get(...at, offset)), whole(body.get(...at, worldField))]
  // Handles and files need no group; what is missing is told by the engines.
  if (first === null || world === null) return null
  const total = sum(workers)
  const missing = fleet.list.filter(worker => !workers.includes(worker) && worker.state !== 'draining')
  const layout = workers.map(({ url, ranks }) => `${url} has ${ranks}`).join(', ')
  if (first + total > world) {
    throw new RefitError(
      'INVALID_REQUEST',
      `${worldField}: ranks from ${offset} ${first} on are ${total} (${layout}), which ${world} has no room for; read tp_size of /server_info again`,
      { param: worldField }
    )
  }
  if (missing.length > 0 && first + total + sum(missing) <= world) {
    throw new RefitError(
      'NO_ENGINE',
      `the group would wait for ranks that do not come: ${
        missing.map(({ url, state }) => `${url} is ${state}`).join(', ')
      }`
    )
  }
  let rank = first
  return new Map(workers.map(worker => {
    const edit: Edit = { at: [...at, offset], value: String(rank) }
    rank += worker.ranks
    return [worker, body.with([edit])]
  }))
}

/** One entry for each rank of all engines: each gets those of its ranks. Other lists are the same for all engines. */
function cut (at: readonly Step[], body: JsonBody, workers: readonly Worker[]): PerEngine {
  if (workers.length < 2 || body.count(...at) !== sum(workers)) return null
  let rank = 0
  return new Map(workers.map(worker => {
    const edit: Edit = { at, value: body.slice(at, rank, worker.ranks) }
    rank += worker.ranks
    return [worker, body.with([edit])]
  }))
}

/** Some clients write numbers as text. */
function whole (value: unknown): number | null {
  const number = typeof value === 'string' && /^\d{1,9}$/.test(value) ? Number(value) : value
  return Number.isSafeInteger(number) ? number as number : null
}

function sum (workers: readonly Worker[]): number {
  return workers.reduce((total, { ranks }) => total + ranks, 0)
}
