import { Readable } from 'node:stream'
import type { FastifyRequest } from 'fastify'
import { RefitError } from '../errors.ts'
import type { EngineRequest } from '../remote/connection.ts'
import { LOOK_MS } from './admission.ts'
import { perEngine } from './bodies.ts'
import { UNNAMED_GROUP } from './gateway-call.ts'
import type { GatewayCall } from './gateway-call.ts'
import { fanOut, fanOutStream } from './fan-out.ts'
import type { Fleet } from './fleet.ts'
import { bodylessHeaders, readHeaders } from './headers.ts'
import { JsonBody } from './json-body.ts'
import type { GatewayMetrics } from './metrics.ts'
import { failureOf, merge } from './replies.ts'
import type { Merged, Outcome } from './replies.ts'
import type { Worker } from './worker.ts'

/** These write weights, or wait for the others that do, or for their memory: a transfer from one engine to another would hold them up, and is given up. */
const BEFORE_FILLS: ReadonlySet<GatewayCall['effect']> = new Set([
  'weights',
  'label',
  'begin',
  'join',
  'pause',
  'memory'
])

const MISSED = 'it did not get all that the update was announced with'

/** Sends a call that is meant for the weights or the state of every engine to every engine, and answers for all. `body` null: an upload, which is not held. */
export async function callEngines (
  { fleet, metrics }: { fleet: Fleet, metrics: GatewayMetrics },
  request: FastifyRequest,
  route: GatewayCall,
  body: Buffer | null
): Promise<Merged> {
  const json = new JsonBody(body ?? Buffer.alloc(0))
  const call = body === null ? route : route.byBody?.(json) ?? route
  if (call.oneEngineOnly !== undefined && fleet.members.length > 1) {
    throw new RefitError(
      'UNSUPPORTED',
      `${fleet.members.length} engines are behind the gateway, and this call is for one: ${call.oneEngineOnly}; ask an engine of /workers`
    )
  }
  const { workers, inGroup } = targets(fleet, call, json)
  if (workers.length === 0) throw fleet.noEngine()
  const lacking = partial(fleet, call, workers)
  if (BEFORE_FILLS.has(call.effect) && request.method !== 'GET') {
    for (const { filling } of workers) {
      filling?.abort(new RefitError('CONFLICT', 'a call for the weights of all engines came meanwhile'))
    }
  }
  const ready = workers.filter(({ state }) => state === 'ready')
  const isUpdate = request.method !== 'GET' && (call.effect === 'weights' || call.effect === 'label')
  if (isUpdate) fleet.updateBegan()
  let outcomes: Outcome[] = []
  const began = performance.now()
  try {
    outcomes = await send(fleet, request, call, body, json, workers)
  } finally {
    metrics.fannedOut(String(request.routeOptions.url), (performance.now() - began) / 1000, outcomes, isUpdate)
    // Where the client broke off, engines have changed nothing, or say themselves what is torn.
    const isWhole = body !== null || request.raw.complete
    if (isUpdate) {
      fleet.updateEnded(
        outcomes.map(outcome => ({
          worker: outcome.worker,
          failure: failureOf(outcome) ?? (lacking.includes(outcome.worker)
            ? MISSED
            : null),
          isUnknown: isWhole && 'error' in outcome
        })),
        checkpointOf(call, json, inGroup)
      )
    }
  }
  follow(fleet, call, json, outcomes)
  if (
    call.effect === 'begin' && request.method !== 'GET' &&
    outcomes.some(outcome => ready.includes(outcome.worker) && failureOf(outcome) !== null)
  ) await takeBack(outcomes, request.headers.authorization)
  // What fails on an engine that is out anyway is told by /workers; a trainer could do nothing about it.
  const told = outcomes.filter(outcome =>
    ready.includes(outcome.worker) ||
    (call.effect !== undefined && failureOf(outcome) === null && !lacking.includes(outcome.worker))
  )
  return merge(call.merge ?? {}, ready.length === 0 ? outcomes : told)
}

/** Those that would take less than the others: nothing is generated on them from now on. They are sent the update all the same, as they wait for it. */
function partial (fleet: Fleet, { announcedBy }: GatewayCall, workers: readonly Worker[]): Worker[] {
  if (announcedBy === undefined) return []
  const lacking = fleet.announced.lacking(announcedBy, workers)
  if (lacking.length === 0) return []
  if (!workers.some(worker => worker.state === 'ready' && !lacking.includes(worker))) {
    throw new RefitError(
      'CONFLICT',
      `no ready engine has all that the update was announced with: ${
        lacking.map(({ url }) => url).join(', ')
      } missed some of it. Nothing was written; begin the update anew`
    )
  }
  for (const worker of lacking) fleet.missed(worker, MISSED)
  return lacking
}

/** What some engines refused to begin is open on none: an update that comes without it would be a part of it on the others. What has been written to stays. */
async function takeBack (outcomes: readonly Outcome[], authorization: string | undefined): Promise<void> {
  const begun = outcomes.filter(outcome => failureOf(outcome) === null && outcome.worker.facts?.kind === 'refit')
  await Promise
    .all(begun.map(async ({ worker: { connection } }) => {
      const options = {
        admin: true,
        headers: authorization === undefined ? {} : { authorization },
        signal: AbortSignal.timeout(LOOK_MS)
      }
      const { body } = await connection.json('GET', '/weight_transactions', undefined, options)
      const { id, written_count: written } =
        (body as { open?: { id?: string, written_count?: number } | null } | undefined)?.open ?? {}
      if (id !== undefined && written === 0) {
        await connection.json('POST', `/weight_transactions/${encodeURIComponent(id)}/abort`, {
          reason: 'another engine behind the gateway refused to begin'
        }, options)
      }
    }))
    .catch(() => {})
}

/** Of a process group its members; else all that live. */
function targets (fleet: Fleet, call: GatewayCall, body: JsonBody): { workers: Worker[], inGroup: boolean } {
  if (call.to !== 'group') return { workers: call.to === 'members' ? fleet.members : fleet.served, inGroup: false }
  const name = groupName(call, body)
  const inGroup = fleet.members.filter(({ groups }) => name === null ? groups.size > 0 : groups.has(name))
  return { workers: inGroup.length > 0 ? inGroup : fleet.members, inGroup: inGroup.length > 0 }
}

async function send (
  fleet: Fleet,
  request: FastifyRequest,
  call: GatewayCall,
  body: Buffer | null,
  json: JsonBody,
  workers: readonly Worker[]
): Promise<Outcome[]> {
  const plain: EngineRequest = {
    method: request.method,
    path: request.url,
    headers: readHeaders(request.headers),
    admin: true
  }
  if (body === null) return await fanOutStream(workers, request.raw, () => plain)
  const bodies = request.method === 'GET' ? null : perEngine(fleet, call, json, workers)
  if (bodies === null) return await fanOut(workers, () => ({ ...plain, body: body.length === 0 ? null : body }))
  const headers = bodylessHeaders(request.headers)
  return await fanOut(workers, worker => {
    const pieces = bodies.get(worker)!
    return {
      ...plain,
      headers: { ...headers, 'content-length': String(pieces.reduce((sum, { length }) => sum + length, 0)) },
      body: Readable.from(pieces.filter(({ length }) => length > 0), { objectMode: false })
    }
  })
}

/** What later calls depend on. */
function follow (fleet: Fleet, call: GatewayCall, body: JsonBody, outcomes: readonly Outcome[]): void {
  const took = outcomes.filter(outcome => failureOf(outcome) === null)
  const { announces, announcedBy } = call
  if (announces !== undefined) {
    fleet.announced.took(
      announces.kind,
      announces.isFirst === true,
      body.bytes,
      took.map(({ worker }) => worker)
    )
  }
  if (announcedBy !== undefined && took.length > 0) fleet.announced.end(announcedBy)
  if (call.effect === 'pause' || call.effect === 'resume') {
    for (const { worker } of took) worker.isPaused = call.effect === 'pause'
  }
  if (call.effect === 'pause' && took.length > 0) fleet.pauseMoved(true)
  if (call.effect === 'resume') {
    for (const { worker } of outcomes) {
      if (worker.isPaused) fleet.unready(worker, 'stale', 'it missed the end of a pause')
    }
    fleet.pauseMoved(false)
  }
  if (call.effect !== 'join' && call.effect !== 'leave') return
  const name = groupName(call, body)
  // An init that names no ranks prepares for handles or files: the group of before is given up.
  const joins = call.ranks !== undefined && body.has(...call.ranks.at, call.ranks.offset)
  for (const { worker } of took) {
    if (joins) worker.groups.add(name ?? UNNAMED_GROUP)
    else worker.groups.delete(name ?? UNNAMED_GROUP)
  }
}

/** Null: it names none. */
function groupName ({ group = { field: 'group_name' } }: GatewayCall, body: JsonBody): string | null {
  return 'name' in group ? group.name : body.text(group.field) ?? null
}

/** Undefined: no weights came. Null: from elsewhere than a checkpoint. */
function checkpointOf (call: GatewayCall, body: JsonBody, inGroup: boolean): string | null | undefined {
  if (call.effect !== 'weights') return undefined
  return call.checkpoint === undefined || inGroup ? null : body.text(...call.checkpoint) ?? null
}
