import type { IncomingHttpHeaders } from 'node:http'
import { STATUS_CODES } from 'node:http'
import { RefitError } from '../errors.ts'
import { messageOf, parsed } from '../remote/connection.ts'
import type { MergeRule } from './gateway-call.ts'
import type { Worker } from './worker.ts'

/** An engine's reply, or the error if there is none. */
export type Outcome = EngineReply | { worker: Worker, error: Error }

/** `json`: the parsed body, undefined if it is no JSON. */
interface EngineReply {
  worker: Worker
  status: number
  headers: IncomingHttpHeaders
  body: Buffer
  json: unknown
}

export interface MergedReply {
  status: number
  type: string
  body: Buffer | string
}

export function failureOf (outcome: Outcome): string | null {
  if ('error' in outcome) return outcome.error.message
  const { status, json } = outcome
  if (status < 400) {
    return (json as { success?: unknown } | null | undefined)?.success === false
      ? textOf(outcome)
      : null
  }
  return `${status} ${textOf(outcome)}`
}

/**
 * Merges the replies of all engines: the first engine's body, with fields merged by the rule and all bodies under
 * `engines`; bodies that are lists are joined. If an engine failed, the status is 502, or the status of all if every
 * engine failed with the same one; the message names each engine that failed.
 */
export function mergeReplies (rule: MergeRule, outcomes: readonly Outcome[]): MergedReply {
  const failed = outcomes.flatMap(outcome => {
    const failure = failureOf(outcome)
    return failure === null ? [] : [{ outcome, failure }]
  })
  if (failed.length > 0) return refusal(outcomes, failed)
  const replies = outcomes.filter((outcome): outcome is EngineReply => !('error' in outcome))
  const first = replies[0]!
  const type = String(first.headers['content-type'] ?? 'application/json')
  if (replies.length === 1 || !/json/.test(type)) return { status: first.status, type, body: first.body }
  const bodies = replies.map(({ json }) => json)
  if (rule.agree !== undefined) requireAgreement(replies.map(({ worker }) => worker), bodies, rule.agree)
  if (bodies.every(body => Array.isArray(body))) {
    return {
      status: first.status,
      type,
      body: JSON.stringify(bodies.flat())
    }
  }
  if (!bodies.every(isObject)) return { status: first.status, type, body: first.body }
  const engines = Object.fromEntries(replies.map(({ worker }, i) => [worker.url, bodies[i]]))
  return { status: first.status, type, body: JSON.stringify({ ...bodies[0], ...mergedFields(rule, bodies), engines }) }
}

/** The merged fields. A field that a body lacks, or that has another type, is not merged. */
function mergedFields (
  { join = [], sum = [], every = [] }: MergeRule,
  bodies: readonly Record<string, unknown>[]
): Record<string, unknown> {
  const fields: Record<string, unknown> = {}
  const values = (name: string, isRight: (value: unknown) => boolean): unknown[] | null =>
    bodies.every(body => isRight(body[name])) ? bodies.map(body => body[name]) : null
  for (const name of join) fields[name] = values(name, Array.isArray)?.flat()
  for (const name of sum) {
    fields[name] = values(name, value => typeof value === 'number')?.reduce<number>(
      (total, value) => total + (value as number),
      0
    )
  }
  for (const name of every) fields[name] = values(name, value => typeof value === 'boolean')?.every(value => value)
  return Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined))
}

interface Failed {
  outcome: Outcome
  failure: string
}

function refusal (outcomes: readonly Outcome[], failed: readonly Failed[]): MergedReply {
  const statuses = new Set(
    failed.map(({ outcome }) => 'error' in outcome || outcome.status < 400 ? 502 : outcome.status)
  )
  const status = failed.length === outcomes.length && statuses.size === 1 ? [...statuses][0]! : 502
  // With one engine, its own reply goes to the client.
  const [first] = outcomes
  if (outcomes.length === 1 && first !== undefined && !('error' in first)) {
    return {
      status: first.status < 400 ? 502 : first.status,
      type: String(first.headers['content-type'] ?? 'application/json'),
      body: first.body
    }
  }
  const message = `${failed.length} of ${outcomes.length} engines failed: ${
    failed.map(({ outcome, failure }) => `${outcome.worker.url}: ${failure}`).join('; ')
  }`
  const engines = Object.fromEntries(outcomes.map(outcome => [outcome.worker.url, engineReport(outcome)]))
  const code = status === 502 || 'error' in failed[0]!.outcome
    ? 'ENGINE_FAILED'
    : (failed[0]!.outcome.json as { error?: { code?: string } } | null | undefined)?.error?.code ?? 'ENGINE_FAILED'
  return {
    status,
    type: 'application/json',
    body: JSON.stringify({
      success: false,
      message,
      type: STATUS_CODES[status],
      code: status,
      error: { message, code },
      engines
    })
  }
}

function engineReport (outcome: Outcome): object {
  if ('error' in outcome) return { success: false, message: outcome.error.message }
  const { status, json, body } = outcome
  return { status, ...isObject(json) ? json : { message: String(body).slice(0, 1000) } }
}

function requireAgreement (workers: readonly Worker[], bodies: readonly unknown[], field: string): void {
  const values = bodies.map(body => JSON.stringify((body as Record<string, unknown> | null)?.[field] ?? null))
  if (new Set(values).size === 1) return
  const shown = workers.map(({ url }, i) => `${url}: ${values[i]!.length > 100 ? 'others' : values[i]}`)
  throw new RefitError('VERSIONS_DISAGREE', `engines hold different weights (${field}): ${shown.join('; ')}`)
}

function textOf ({ status, body, json }: EngineReply): string {
  return messageOf({ status, body: json, text: String(body) })
}

/** An engine's reply with its body parsed. */
export function replyOf (worker: Worker, status: number, headers: IncomingHttpHeaders, body: Buffer): Outcome {
  return {
    worker,
    status,
    headers,
    body,
    json: /json/.test(String(headers['content-type'] ?? 'json')) ? parsed(String(body)) : undefined
  }
}

function isObject (value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
}
