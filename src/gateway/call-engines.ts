import { Readable } from 'node:stream'
import type { FastifyRequest } from 'fastify'
import { RefitError } from '../errors.ts'
import { BORROWED_HEADER } from '../http/borrowed-header.ts'
import { decodeLabel, WEIGHT_VERSION_HEADER } from '../http/weight-version-header.ts'
import type { EngineRequest } from '../remote/connection.ts'
import { bodyPerEngine } from './bodies.ts'
import { UNNAMED_GROUP } from './gateway-call.ts'
import type { GatewayCall } from './gateway-call.ts'
import { fanOut, fanOutStream } from './fan-out.ts'
import type { Fleet } from './fleet.ts'
import { bodylessHeaders, readHeaders } from './headers.ts'
import { JsonBody } from './json-body.ts'
import type { GatewayMetrics } from './metrics.ts'
import { abortBegun, abortMissed } from './open-transactions.ts'
import { failureOf, mergeReplies } from './replies.ts'
import type { MergedReply, Outcome } from './replies.ts'
import type { Worker } from './worker.ts'

/**
 * These calls write weights, or wait for writes or for memory. A catch-up that runs would hold them up, so it is
 * aborted.
 */
const ABORTS_CATCH_UP: ReadonlySet<GatewayCall['effect']> = new Set([
  'weights',
  'label',
  'begin',
  'join',
  'pause',
  'memory'
])

const MISSED = 'it did not get all that the update was announced with'

/** A call with its body and the engines that it goes to. */
interface Sent {
  call: GatewayCall
  /** Null: the body is streamed and cannot be read. */
  body: Buffer | null
  json: JsonBody
  workers: readonly Worker[]
  inGroup: boolean
}

/**
 * Sends a call about the weights or the state of the engines to all of them and merges their replies. `body` null: the
 * body is passed on piece by piece.
 */
export async function callEngines (
  { fleet, metrics }: { fleet: Fleet, metrics: GatewayMetrics },
  request: FastifyRequest,
  route: GatewayCall,
  body: Buffer | null
): Promise<MergedReply> {
  const json = new JsonBody(body ?? Buffer.alloc(0))
  const call = body === null ? route : route.byBody?.(json) ?? route
  if (call.oneEngineOnly !== undefined && fleet.members.length > 1) {
    throw new RefitError(
      'UNSUPPORTED',
      `${fleet.members.length} engines are behind the gateway, and this call is for one: ${call.oneEngineOnly}; ` +
        'call an engine of /workers'
    )
  }
  const { workers, inGroup } = targets(fleet, call, json)
  if (workers.length === 0) throw fleet.noEngine()
  const sent: Sent = { call, body, json, workers, inGroup }
  const incomplete = refuseIncomplete(fleet, call, workers)
  const isRead = request.method === 'GET'
  if (!isRead && ABORTS_CATCH_UP.has(call.effect)) {
    for (const { catchingUp } of workers) {
      catchingUp?.abort(new RefitError('CONFLICT', 'a call for the weights of all engines came meanwhile'))
    }
  }
  const ready = workers.filter(({ state }) => state === 'ready')
  const outcomes = await sendCounted(fleet, metrics, request, sent, incomplete)
  remember(fleet, call, json, outcomes)
  await rememberAdapter(fleet, request, sent, outcomes)
  if (
    call.effect === 'begin' && !isRead &&
    outcomes.some(outcome => ready.includes(outcome.worker) && failureOf(outcome) !== null)
  ) await abortBegun(outcomes, request.headers.authorization)
  if (call.endsTransaction === true) {
    const { id = null } = request.params as { id?: string }
    await abortMissed(outcomes, ready, id, request.headers.authorization)
  }
  // /workers shows failures of engines that are out of rotation; a trainer could do nothing about them.
  const reported = outcomes.filter(outcome =>
    ready.includes(outcome.worker) ||
    (call.effect !== undefined && failureOf(outcome) === null && !incomplete.includes(outcome.worker))
  )
  return mergeReplies(call.merge ?? {}, ready.length === 0 ? outcomes : reported)
}

/** Sends the call, counts it, and records in the fleet which engines took an update. */
async function sendCounted (
  fleet: Fleet,
  metrics: GatewayMetrics,
  request: FastifyRequest,
  sent: Sent,
  incomplete: readonly Worker[]
): Promise<Outcome[]> {
  const { call, body, json, inGroup } = sent
  const isUpdate = request.method !== 'GET' && (call.effect === 'weights' || call.effect === 'label')
  if (isUpdate) fleet.updateBegan()
  let outcomes: Outcome[] = []
  const began = performance.now()
  try {
    outcomes = await send(fleet, request, sent)
    return outcomes
  } finally {
    metrics.fannedOut(String(request.routeOptions.url), (performance.now() - began) / 1000, outcomes, isUpdate)
    // If the client broke off, each engine either changed nothing or reports itself what is torn.
    const isWhole = body !== null || request.raw.complete
    if (isUpdate) {
      fleet.updateEnded(
        outcomes.map(outcome => ({
          worker: outcome.worker,
          failure: failureOf(outcome) ?? (incomplete.includes(outcome.worker) ? MISSED : null),
          isUnknown: isWhole && 'error' in outcome,
          label: 'error' in outcome ? undefined : decodeLabel(outcome.headers[WEIGHT_VERSION_HEADER])
        })),
        outcomes.some(outcome => adapterIn(outcome) !== undefined) ? undefined : checkpointOf(call, json, inGroup)
      )
    }
  }
}

/**
 * Returns the engines that missed an announcement and marks them stale: they would write fewer tensors than the others.
 * They still get the update, because they wait for it. Throws CONFLICT if no ready engine has all announcements.
 */
function refuseIncomplete (fleet: Fleet, { announcedBy }: GatewayCall, workers: readonly Worker[]): Worker[] {
  if (announcedBy === undefined) return []
  const incomplete = fleet.announcements.incomplete(announcedBy, workers)
  if (incomplete.length === 0) return []
  if (!workers.some(worker => worker.state === 'ready' && !incomplete.includes(worker))) {
    throw new RefitError(
      'CONFLICT',
      `no ready engine has all that the update was announced with: ${
        incomplete.map(({ url }) => url).join(', ')
      } missed some of it. Nothing was written; begin the update anew`
    )
  }
  for (const worker of incomplete) fleet.missed(worker, MISSED)
  return incomplete
}

/** A call for a process group goes to the members that joined it; if none did, to all members. */
function targets (fleet: Fleet, call: GatewayCall, body: JsonBody): { workers: Worker[], inGroup: boolean } {
  if (call.to !== 'group') return { workers: call.to === 'members' ? fleet.members : fleet.served, inGroup: false }
  const name = groupName(call, body)
  const inGroup = fleet.members.filter(({ groups }) => name === null ? groups.size > 0 : groups.has(name))
  return { workers: inGroup.length > 0 ? inGroup : fleet.members, inGroup: inGroup.length > 0 }
}

async function send (
  fleet: Fleet,
  request: FastifyRequest,
  { call, body, json, workers }: Sent
): Promise<Outcome[]> {
  const plain: EngineRequest = {
    method: request.method,
    path: request.url,
    headers: readHeaders(request.headers),
    admin: true
  }
  if (body === null) return await fanOutStream(workers, request.raw, () => plain)
  const bodies = request.method === 'GET' ? null : bodyPerEngine(fleet, call, json, workers)
  const same: EngineRequest = { ...plain, body: body.length === 0 ? null : body }
  if (bodies === null) return call.perRank === undefined ? await fanOut(workers, () => same) : await lend(workers, same)
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

/** Sends the same handles to several engines: the first gets them last, and alone gives their references back. */
async function lend ([first, ...others]: readonly Worker[], request: EngineRequest): Promise<Outcome[]> {
  const borrowed = { ...request, headers: { ...request.headers, [BORROWED_HEADER]: '1' } }
  const outcomes = await fanOut(others, () => borrowed)
  return [...await fanOut([first!], () => request), ...outcomes]
}

/** The replies show whether prime-rl's updates are adapters, and AReaL's announced ones name the version before. */
async function rememberAdapter (
  { adapters }: Fleet,
  { method, url, params }: FastifyRequest,
  { call: { adapter, announcedBy }, json }: Sent,
  outcomes: readonly Outcome[]
): Promise<void> {
  if (adapter === 'path') {
    const { '*': name } = params as { '*': string }
    if (method === 'POST') adapters.loaded(name, null, outcomes)
    else if (method === 'DELETE') adapters.unloaded(name, outcomes)
    return
  }
  const request = { path: url.split('?', 1)[0]!, body: json.bytes }
  if (adapter !== undefined) adapters.record(adapter, request, outcomes)
  else {
    const name = outcomes.map(adapterIn).find(own => own !== undefined)
    // Engines that have only a part of it do not hold it.
    const holders = outcomes.filter(outcome => adapterIn(outcome) === name)
    if (name !== undefined) adapters.loaded(name, announcedBy === undefined ? request : null, holders)
  }
  const old = outcomes.map(unloadedIn).find(own => own !== undefined)
  if (old !== undefined) await adapters.replaced(old, outcomes.filter(outcome => unloadedIn(outcome) === old))
}

/** The adapter that an engine has loaded by an update of weights. */
function adapterIn (outcome: Outcome): string | undefined {
  const { adapter } = replyOf(outcome)
  return typeof adapter?.name === 'string' ? adapter.name : undefined
}

/** The version that gave its place to the adapter of the call. */
function unloadedIn (outcome: Outcome): string | undefined {
  const { unloaded_adapter: name } = replyOf(outcome)
  return typeof name === 'string' ? name : undefined
}

function replyOf (outcome: Outcome): { adapter?: { name?: unknown } | null, unloaded_adapter?: unknown } {
  return 'error' in outcome || failureOf(outcome) !== null ? {} : outcome.json ?? {}
}

/** Records what later calls depend on: announcements, pauses and process groups. */
function remember (fleet: Fleet, call: GatewayCall, body: JsonBody, outcomes: readonly Outcome[]): void {
  const took = outcomes.filter(outcome => failureOf(outcome) === null)
  const { announces, announcedBy } = call
  if (announces !== undefined) {
    fleet.announcements.add(
      announces.kind,
      announces.isFirst === true,
      body.bytes,
      took.map(({ worker }) => worker)
    )
  }
  if (announcedBy !== undefined && took.length > 0) fleet.announcements.end(announcedBy)
  if (call.effect === 'pause' || call.effect === 'resume') {
    for (const { worker } of took) worker.isPaused = call.effect === 'pause'
  }
  if (call.effect === 'pause' && took.length > 0) fleet.setPaused(true)
  if (call.effect === 'resume') {
    for (const { worker } of outcomes) {
      if (worker.isPaused) fleet.unready(worker, 'stale', 'it missed the end of a pause')
    }
    fleet.setPaused(false)
  }
  if (call.effect !== 'join' && call.effect !== 'leave') return
  const name = groupName(call, body)
  // An init without ranks prepares for handles or files; the engine then leaves the group that it was in.
  const joins = call.ranks !== undefined && body.has(...call.ranks.at, call.ranks.offset)
  for (const { worker } of took) {
    if (joins) worker.groups.add(name ?? UNNAMED_GROUP)
    else worker.groups.delete(name ?? UNNAMED_GROUP)
  }
}

/** Null if the body names no group. */
function groupName ({ group = { field: 'group_name' } }: GatewayCall, body: JsonBody): string | null {
  return 'name' in group ? group.name : body.text(group.field) ?? null
}

/**
 * The checkpoint that an update loads. Undefined: the call carries no weights. Null: the weights come from somewhere
 * else.
 */
function checkpointOf (call: GatewayCall, body: JsonBody, inGroup: boolean): string | null | undefined {
  if (call.effect !== 'weights') return undefined
  return call.checkpoint === undefined || inGroup ? null : body.text(...call.checkpoint) ?? null
}
