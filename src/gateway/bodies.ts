import { randomUUID } from 'node:crypto'
import { RefitError } from '../errors.ts'
import type { GatewayCall, RankFields } from './gateway-call.ts'
import type { Fleet } from './fleet.ts'
import type { Edit, JsonBody, Pieces, Step } from './json-body.ts'
import type { Worker } from './worker.ts'

/** The body for each engine; null: all engines get the request's own body. */
export type BodyPerEngine = ReadonlyMap<Worker, Pieces> | null

/**
 * Makes a body for each engine where they must differ: in the ranks that an engine has in a process group, and in the
 * handles for its GPUs. Ranks are numbered engine by engine in the order of /workers. All other bytes of the body stay
 * the same.
 */
export function bodyPerEngine (
  fleet: Fleet,
  call: GatewayCall,
  body: JsonBody,
  workers: readonly Worker[]
): BodyPerEngine {
  if (call.ranks !== undefined) return withRanks(fleet, call.ranks, body, workers)
  if (call.perRank !== undefined) return split(call.perRank, body, workers)
  if (call.sharesId !== true || body.has('id')) return null
  const id = JSON.stringify(randomUUID())
  // If the body has `id` twice, the last one counts.
  const named = body.get('id') === null ? body.with([{ at: ['id'], value: id }]) : body.withMember('id', id)
  return named === null ? null : new Map(workers.map(worker => [worker, named]))
}

/**
 * Sets each engine's rank offset. Throws if an engine of the group is down: the others would wait for its ranks in
 * vain.
 */
function withRanks (
  fleet: Fleet,
  { at, offset, world: worldField }: RankFields,
  body: JsonBody,
  workers: readonly Worker[]
): BodyPerEngine {
  const [first, world] = [whole(body.get(...at, offset)), whole(body.get(...at, worldField))]
  // An init for handles or files has no ranks; the engines refuse fields that are missing.
  if (first === null || world === null) return null
  const total = sum(workers)
  const missing = fleet.list.filter(worker => !workers.includes(worker) && worker.state !== 'draining')
  const layout = workers.map(({ url, ranks }) => `${url} has ${ranks}`).join(', ')
  if (first + total > world) {
    throw new RefitError(
      'INVALID_REQUEST',
      `${worldField}: ranks from ${offset} ${first} on are ${total} (${layout}), which ${world} has no room for; ` +
        'read tp_size of /server_info again',
      { param: worldField }
    )
  }
  if (missing.length > 0 && first + total + sum(missing) <= world) {
    throw new RefitError(
      'NO_ENGINE',
      `the group would wait for ranks that cannot join: ${
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

/** Gives each engine the entries of its ranks. A list of any other length is the same for all engines. */
function split (at: readonly Step[], body: JsonBody, workers: readonly Worker[]): BodyPerEngine {
  if (workers.length < 2 || body.count(...at) !== sum(workers)) return null
  let rank = 0
  return new Map(workers.map(worker => {
    const edit: Edit = { at, value: body.slice(at, rank, worker.ranks) }
    rank += worker.ranks
    return [worker, body.with([edit])]
  }))
}

/** A whole number; some clients send it as text. */
function whole (value: unknown): number | null {
  const number = typeof value === 'string' && /^\d{1,9}$/.test(value) ? Number(value) : value
  return Number.isSafeInteger(number) ? number as number : null
}

function sum (workers: readonly Worker[]): number {
  return workers.reduce((total, { ranks }) => total + ranks, 0)
}
