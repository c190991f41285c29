import { randomUUID } from 'node:crypto'
import type { FastifyRequest } from 'fastify'
import { parsed } from '../remote/connection.ts'
import type { Call } from '../remote/connection.ts'
import { perEngine } from './bodies.ts'
import { fanOut, fanOutStream } from './fan-out.ts'
import type { Fleet } from './fleet.ts'
import { bodylessHeaders, requestHeaders } from './headers.ts'
import { failureOf, merge } from './replies.ts'
import type { Merged, Outcome } from './replies.ts'
import type { Worker } from './worker.ts'

const WEIGHTS = /update_weights|weight_update$|update_weight_version$|\/weight_transactions\/[^/]+\/commit$|_lora_adapter|\/collective_rpc$/
/** They have the word in their names and move no weights. */
const NO_WEIGHTS = /init_weights_update_group$|destroy_weights_update_group$/
/** They end or label what others brought. */
const NO_BYTES = /weight_update$|update_weight_version$|\/commit$|_lora_adapter/
/** What they bring to a host's disk is for an engine that is being filled, too. */
const HOSTS = /\/(pull|fetch)_weights$/
const PAUSE = /^\/(areal_)?pause(_generation)?$/
const RESUME = /^\/((areal_)?continue_generation|resume)$/
/** Calls of vLLM's transfer engine name no group; there is one. */
const NAMELESS = 'weight_update_group'

/** Sends a call that is meant for the weights or the state of every engine to every engine, and answers for all. */
export async function control (fleet: Fleet, request: FastifyRequest, body: Buffer | null): Promise<Merged> {
  const path = request.url.split('?', 1)[0]!
  const fields = body === null ? undefined : parsed(String(body))
  const workers = targets(fleet, path, fields)
  if (workers.length === 0) throw fleet.noEngine()
  const ready = workers.filter(({ state }) => state === 'ready')
  const isUpdate = request.method !== 'GET' && WEIGHTS.test(path) && !NO_WEIGHTS.test(path)
  if (isUpdate) fleet.updateBegan()
  let outcomes: Outcome[] = []
  try {
    outcomes = await send(fleet, request, path, body, fields, workers)
  } finally {
    if (isUpdate) fleet.updateEnded(outcomes.map(outcome => ({ worker: outcome.worker, failure: failureOf(outcome) })), checkpointOf(path, fields))
  }
  follow(fleet, path, fields, outcomes)
  // What fails on an engine that is out anyway is told by /workers; a trainer could do nothing about it.
  return merge(path, ready.length === 0 ? outcomes : outcomes.filter(({ worker }) => ready.includes(worker)))
}

/** Of a process group its members; else all that live. */
function targets (fleet: Fleet, path: string, fields: unknown): Worker[] {
  if (isInit(path)) return fleet.members
  if (!/from_distributed$|destroy_weights_update_group$|_xccl$|^\/update_weights$/.test(path)) return WEIGHTS.test(path) || HOSTS.test(path) ? fleet.members : fleet.served
  const inGroup = fleet.members.filter(({ groups }) => groups.has(groupName(fields)))
  return inGroup.length > 0 ? inGroup : fleet.members
}

async function send (fleet: Fleet, request: FastifyRequest, path: string, body: Buffer | null, fields: unknown, workers: readonly Worker[]): Promise<Outcome[]> {
  const call: Call = { method: request.method, path: request.url, headers: requestHeaders(request.headers), admin: true }
  if (body === null) return await fanOutStream(workers, request.raw, () => call)
  const own = opened(path, request.method, fields) ?? fields
  const bodies = perEngine(fleet, path, own, workers)
  if (bodies === null && own === fields) return await fanOut(workers, () => ({ ...call, body: body.length === 0 ? null : body }))
  const headers = bodylessHeaders(request.headers)
  return await fanOut(workers, worker => ({ ...call, headers, body: JSON.stringify(bodies?.get(worker) ?? own) }))
}

/** All engines open a transaction under one id. */
function opened (path: string, method: string, fields: unknown): object | null {
  if (method !== 'POST' || path !== '/weight_transactions' || typeof fields !== 'object' || fields === null) return null
  return { id: randomUUID(), ...fields }
}

/** What later calls depend on. */
function follow (fleet: Fleet, path: string, fields: unknown, outcomes: readonly Outcome[]): void {
  const took = outcomes.filter(outcome => failureOf(outcome) === null)
  if (PAUSE.test(path) && took.length > 0) fleet.pauseMoved(true)
  if (RESUME.test(path)) fleet.pauseMoved(false)
  for (const { worker } of took) {
    if (isInit(path)) worker.groups.add(groupName(fields))
    if (/destroy_weights_update_group$/.test(path)) worker.groups.delete(groupName(fields))
  }
}

function isInit (path: string): boolean { return /\/(areal_)?init_weights_update_group$|^\/init_weight_transfer_engine$/.test(path) }

function groupName (fields: unknown): string {
  const name = (fields as { group_name?: unknown } | null | undefined)?.group_name
  return typeof name === 'string' ? name : NAMELESS
}

/** Undefined: no weights came. Null: from elsewhere than a checkpoint. */
function checkpointOf (path: string, fields: unknown): string | null | undefined {
  if (NO_BYTES.test(path)) return undefined
  const { model_path: from } = (fields ?? {}) as { model_path?: unknown }
  return path === '/update_weights_from_disk' && typeof from === 'string' ? from : null
}
