import type { IncomingHttpHeaders } from 'node:http'
import { STATUS_CODES } from 'node:http'
import { RefitError } from '../errors.ts'
import { messageOf, parsed } from '../remote/connection.ts'
import type { Worker } from './worker.ts'

/** What one engine answered, or why there is no answer. */
export type Outcome = Answer | { worker: Worker, error: Error }

interface Answer { worker: Worker, status: number, headers: IncomingHttpHeaders, body: Buffer }

export interface Merged { status: number, type: string, body: Buffer | string }

/** Replies that engines which hold the same weights give alike: the field that has to agree. */
const AGREE: Readonly<Record<string, string>> = { '/weight_version': 'weight_version', '/get_weight_version': 'weight_version', '/weight_info': 'weight_version', '/weights_checker': 'checksums' }

export function failureOf (outcome: Outcome): string | null {
  if ('error' in outcome) return outcome.error.message
  const { status, body } = outcome
  if (status < 400) return (parsed(String(body)) as { success?: unknown } | null | undefined)?.success === false ? wordsOf(outcome) : null
  return `${status} ${wordsOf(outcome)}`
}

/**
 * One answer for many: the first engine's, with those of all under `engines`; lists are joined. Where any failed, the status that all failures
 * share if all engines failed, else 502; the message names each engine that failed.
 */
export function merge (path: string, outcomes: readonly Outcome[]): Merged {
  const failed = outcomes.flatMap(outcome => {
    const failure = failureOf(outcome)
    return failure === null ? [] : [{ outcome, failure }]
  })
  if (failed.length > 0) return refusal(outcomes, failed)
  const answered = outcomes.filter((outcome): outcome is Answer => !('error' in outcome))
  const first = answered[0]!
  const type = String(first.headers['content-type'] ?? 'application/json')
  if (answered.length === 1 || !/json/.test(type)) return { status: first.status, type, body: first.body }
  const bodies = answered.map(({ body }) => parsed(String(body)))
  const field = AGREE[path]
  if (field !== undefined) demandAgreement(answered.map(({ worker }) => worker), bodies, field)
  if (bodies.every(body => Array.isArray(body))) return { status: first.status, type, body: JSON.stringify(bodies.flat()) }
  if (!bodies.every(isObject)) return { status: first.status, type, body: first.body }
  const engines = Object.fromEntries(answered.map(({ worker }, i) => [worker.url, bodies[i]]))
  // Of loads every entry counts: clients sum them up.
  const loads = bodies.every(({ loads }) => Array.isArray(loads)) ? { loads: bodies.flatMap(({ loads }) => loads) } : {}
  return { status: first.status, type, body: JSON.stringify({ ...bodies[0], ...loads, engines }) }
}

interface Failed { outcome: Outcome, failure: string }

function refusal (outcomes: readonly Outcome[], failed: readonly Failed[]): Merged {
  const statuses = new Set(failed.map(({ outcome }) => 'error' in outcome || outcome.status < 400 ? 502 : outcome.status))
  const status = failed.length === outcomes.length && statuses.size === 1 ? [...statuses][0]! : 502
  // All refuse alike, and nothing has changed anywhere: their own words and code.
  const [first] = outcomes
  if (outcomes.length === 1 && first !== undefined && !('error' in first)) return { status: first.status < 400 ? 502 : first.status, type: String(first.headers['content-type'] ?? 'application/json'), body: first.body }
  const message = `${failed.length} of ${outcomes.length} engines failed: ${failed.map(({ outcome, failure }) => `${outcome.worker.url}: ${failure}`).join('; ')}`
  const engines = Object.fromEntries(outcomes.map(outcome => [outcome.worker.url, engineReport(outcome)]))
  const code = status === 502 || 'error' in failed[0]!.outcome ? 'ENGINE_FAILED' : (parsed(String(failed[0]!.outcome.body)) as { error?: { code?: string } } | undefined)?.error?.code ?? 'ENGINE_FAILED'
  return { status, type: 'application/json', body: JSON.stringify({ success: false, message, type: STATUS_CODES[status], code: status, error: { message, code }, engines }) }
}

function engineReport (outcome: Outcome): object {
  if ('error' in outcome) return { success: false, message: outcome.error.message }
  const body = parsed(String(outcome.body))
  return { status: outcome.status, ...isObject(body) ? body : { message: String(outcome.body).slice(0, 1000) } }
}

function demandAgreement (workers: readonly Worker[], bodies: readonly unknown[], field: string): void {
  const values = bodies.map(body => JSON.stringify((body as Record<string, unknown> | null)?.[field] ?? null))
  if (new Set(values).size === 1) return
  const said = workers.map(({ url }, i) => `${url}: ${values[i]!.length > 100 ? 'others' : values[i]}`)
  throw new RefitError('VERSIONS_DISAGREE', `engines hold different weights (${field}): ${said.join('; ')}`)
}

function wordsOf (outcome: Answer): string {
  const text = String(outcome.body)
  return messageOf({ status: outcome.status, body: parsed(text), text })
}

function isObject (value: unknown): value is Record<string, unknown> { return typeof value === 'object' && value !== null && !Array.isArray(value) }
