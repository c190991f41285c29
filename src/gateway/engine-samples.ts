import type { IncomingHttpHeaders } from 'node:http'
import { RefitError } from '../errors.ts'
import type { Found, Measured, Truth, TruthClaim } from '../http/samples/truth-schemas.ts'
import { messageOf } from '../remote/connection.ts'
import { fanOut } from './fan-out.ts'
import type { Fleet } from './fleet.ts'
import { readHeaders } from './headers.ts'
import { joinReports, joinTruths } from './join-truths.ts'
import { askRefitEngines, postOf, readRefitEngines } from './refit-engines.ts'
import { failureOf } from './replies.ts'
import type { Outcome } from './replies.ts'
import type { Worker } from './worker.ts'

// An engine keeps the samples that it generated. The gateway remembers no ids: it asks the engines for them, so that
// nothing grows with the samples and nothing is lost when the gateway restarts.

interface Owner {
  worker: Worker
  ended: number
}

/** `silent`: the engines that did not answer, with the reason; one of them may have kept what is not found. */
interface Owners {
  owners: Map<string, Owner>
  silent: string[]
}

/** Clients may use an id again: the engine with the newest sample owns it. */
async function findOwners (fleet: Fleet, ids: readonly string[], headers: IncomingHttpHeaders): Promise<Owners> {
  const owners = new Map<string, Owner>()
  const silent: string[] = []
  const outcomes = await askRefitEngines(fleet, '/samples/find', { ids }, headers)
  for (const outcome of outcomes) {
    const found = repliedBy<Found>(outcome)
    if (typeof found === 'string') silent.push(found)
    else {
      for (const { id, ended } of found.samples) {
        if (ended > (owners.get(id)?.ended ?? -1)) owners.set(id, { worker: outcome.worker, ended })
      }
    }
  }
  requireSome(fleet, outcomes, silent)
  return { owners, silent }
}

/** The samples that at least one engine keeps. */
export async function findSamples (fleet: Fleet, ids: readonly string[], headers: IncomingHttpHeaders): Promise<Found> {
  const { owners } = await findOwners(fleet, ids, headers)
  return { samples: [...owners].map(([id, { ended }]) => ({ id, ended })) }
}

/** The reply of the engine that keeps the sample to a request for its receipt. */
export async function readReceipt (
  fleet: Fleet,
  id: string,
  { url, headers }: { url: string, headers: IncomingHttpHeaders }
): Promise<Outcome> {
  const { owners, silent } = await findOwners(fleet, [id], headers)
  const owner = owners.get(id)
  if (owner === undefined) throw notKept(id, silent, 'id')
  // Without a deadline: the digest of a large model takes a while.
  const [outcome] = await fanOut([owner.worker], () => ({ method: 'GET', path: url, headers: readHeaders(headers) }))
  return outcome!
}

/** Sends each claim to the engine that keeps its sample. */
export async function measureTruth (
  fleet: Fleet,
  claims: readonly TruthClaim[],
  headers: IncomingHttpHeaders
): Promise<Measured> {
  const { owners, silent } = await findOwners(fleet, [...new Set(claims.map(({ id }) => id))], headers)
  const parts = new Map<Worker, number[]>()
  const unknown: string[] = []
  for (const [index, { id }] of claims.entries()) {
    const owner = owners.get(id)?.worker
    if (owner === undefined) unknown.push(id)
    else if (!parts.has(owner)) parts.set(owner, [index])
    else parts.get(owner)!.push(index)
  }
  const outcomes = await fanOut(
    [...parts.keys()],
    worker => postOf('/truth', { samples: parts.get(worker)!.map(index => claims[index]) }, headers)
  )
  const reports: Measured[] = []
  for (const outcome of outcomes) {
    const part = parts.get(outcome.worker)!
    // Its samples have made room for newer ones in the meantime.
    if ('status' in outcome && outcome.status === 404) unknown.push(...part.map(index => claims[index]!.id))
    else reports.push(reportOf(outcome, part))
  }
  if (reports.length === 0) throw notKept(unknown[0]!, silent, 'samples')
  return joinReports(reports, unknown)
}

/** Everything that the engines have measured since they were started. */
export async function readTruth (fleet: Fleet, headers: IncomingHttpHeaders): Promise<Truth> {
  const outcomes = await readRefitEngines(fleet, '/truth', headers)
  const replies = outcomes.map(outcome => repliedBy<Truth>(outcome))
  requireSome(fleet, outcomes, replies.filter(reply => typeof reply === 'string'))
  return joinTruths(replies.filter(reply => typeof reply !== 'string'))
}

/** The engine's comparison of its part. Throws its refusal, with the places that the samples have in the whole body. */
function reportOf (outcome: Outcome, part: readonly number[]): Measured {
  const report = repliedBy<Measured>(outcome)
  if (typeof report !== 'string') return report
  if ('error' in outcome || outcome.status !== 400) throw new RefitError('ENGINE_FAILED', report)
  const { json, status, body } = outcome
  const whole = (text: string): string =>
    text.replace(/^samples\[(\d+)\]/, (_, index) => `samples[${part[Number(index)] ?? index}]`)
  const { param } = (json ?? {}) as { param?: unknown }
  throw new RefitError('INVALID_REQUEST', whole(messageOf({ status, body: json, text: String(body) })), {
    ...typeof param === 'string' ? { param: whole(param) } : {}
  })
}

/** The engine's reply, or its failure as text. */
function repliedBy<T extends object> (outcome: Outcome): T | string {
  const failure = failureOf(outcome)
  if (failure === null && 'json' in outcome && typeof outcome.json === 'object') return outcome.json as T
  return `${outcome.worker.url}: ${failure ?? 'it answered without JSON'}`
}

function requireSome (fleet: Fleet, outcomes: readonly Outcome[], failures: readonly string[]): void {
  if (outcomes.length === 0) throw fleet.noEngine()
  if (failures.length === outcomes.length) throw new RefitError('ENGINE_FAILED', failures.join('; '))
}

function notKept (id: string, silent: readonly string[], param: string): RefitError {
  const others = silent.length === 0 ? '' : `; some did not answer: ${silent.join('; ')}`
  return new RefitError(
    'NOT_FOUND',
    `no engine keeps a sample ${JSON.stringify(id)}: each keeps its last samples of requests with "receipt": true ` +
      `(--keep-samples, --samples-memory)${others}`,
    { param }
  )
}
