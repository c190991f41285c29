import type { IncomingHttpHeaders } from 'node:http'
import { STATUS_CODES } from 'node:http'
import { RefitError } from '../errors.ts'
import { messageOf, parsed } from '../remote/connection.ts'
import type { MergeRule } from './gateway-call.ts'
import type { Worker } from './worker.ts'

/** What one engine answered, or why there is no answer. */
export type Outcome = Answer | { worker: Worker, error: Error }

/** `json`: the body read, undefined where it is no JSON. */
interface Answer {
  worker: Worker
  status: number
  headers: IncomingHttpHeaders
  body: Buffer
  json: unknown
}

export interface Merged {
  status: number
  type: string
  body: Buffer | string
}

export function failureOf (outcome: Outcome): string | null {
  if ('error' in outcome) return outcome.error.message
  const { status, json } = outcome
  if (status < 400) {
    return (json as { success?: unknown } | null | undefined)?.success === false
      ? wordsOf(outcome)
      : null
  }
  return `${status} ${wordsOf(outcome)}`
}

/**
 * One answer for many: the first engine's, with those of all under `engines`; a body that is a list is joined, and fields as the rule says. Where any failed, the status that all failures
 * share if all engines failed, else 502; the message names each engine that failed.
 */
export function merge (rule: MergeRule, outcomes: readonly Outcome[]): Merged {
  const failed = outcomes.flatMap(outcome => {
    const failure = failureOf(outcome)
    return failure === null ? [] : [{ outcome, failure }]
  })
  if (failed.length > 0) return refusal(outcomes, failed)
  const answered = outcomes.filter((outcome): outcome is Answer => !('error' in outcome))
  const first = answered[0]!
  const type = String(first.headers['content-type'] ?? 'application/json')
  if (answered.length === 1 || !/json/.test(type)) return { status: first.status, type, body: first.body }
  const bodies = answered.map(({ json }) => json)
  if (rule.agree !== undefined) demandAgreement(answered.map(({ worker }) => worker), bodies, rule.agree)
  if (bodies.every(body => Array.isArray(body))) {
    return {
      status: first.status,
      type,
      body: JSON.stringify(bodies.flat())
    }
  }
  if (!bodies.every(isObject)) return { status: first.status, type, body: first.body }
  const engines = Object.fromEntries(answered.map(({ worker }, i) => [worker.url, bodies[i]]))
  return { status: first.status, type, body: JSON.stringify({ ...bodies[0], ...together(rule, bodies), engines }) }
}

/** Fields that are of all engines, where all have them. */
function together (
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

function refusal (outcomes: readonly Outcome[], failed: readonly Failed[]): Merged {
  const statuses = new Set(
    failed.map(({ outcome }) => 'error' in outcome || outcome.status < 400 ? 502 : outcome.status)
  )
  const status = failed.length === outcomes.length && statuses.size === 1 ? [...statuses][0]! : 502
  // All refuse alike, and nothing has changed anywhere: their own words and code.
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

function demandAgreement (workers: readonly Worker[], bodies: readonly unknown[], field: string): void {
  const values = bodies.map(body => JSON.stringify((body as Record<string, unknown> | null)?.[field] ?? null))
  if (new Set(values).size === 1) return
  const said = workers.map(({ url }, i) => `${url}: ${values[i]!.length > 100 ? 'others' : values[i]}`)
  throw new RefitError('VERSIONS_DISAGREE', `engines hold different weights (${field}): ${said.join('; ')}`)
}

function wordsOf ({ status, body, json }: Answer): string {
  return messageOf({ status, body: json, text: String(body) })
}

/** An engine's reply, read. */
export function answerOf (worker: Worker, status: number, headers: IncomingHttpHeaders, body: Buffer): Outcome {
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
