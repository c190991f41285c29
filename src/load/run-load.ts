import type { LoadApi, LoadRequest } from './api.ts'
import { realClock } from './clock.ts'
import type { Clock } from './clock.ts'
import type { ServerConnection } from '../client/server-connection.ts'
import { drawLength } from './lengths.ts'
import type { Lengths } from './lengths.ts'
import { promptIds, promptText } from './prompts.ts'
import type { IdRange } from './prompts.ts'
import { exponential, randomFrom } from './random.ts'
import { Series } from './series.ts'
import type { LoadResult } from './series.ts'

export interface LoadPlan {
  connection: ServerConnection
  api: LoadApi
  model: string
  deltas?: boolean
  /** Closed loop: this many requests at a time. Open loop: Poisson arrivals, this many requests a second. */
  arrivals: { concurrency: number } | { rate: number }
  /** The load ends with whichever comes first. Requests that have begun are finished. */
  requests: number | null
  seconds: number | null
  /** Requests before the measurement; they are not counted. */
  warmup: number
  prompt: Lengths
  output: Lengths
  /** Tokens at the beginning of all prompts that are the same. */
  sharedPrefix: number
  ids: IdRange
  samples: number
  temperature: number
  ignoreEos: boolean
  seed: number
  timeoutMs: number
  clock?: Clock
  signal?: AbortSignal
}

/** Streams of random numbers; prompts have one each. */
const [PROMPT_LENGTHS, OUTPUT_LENGTHS, ARRIVALS] = [0, 1, 2]

/** Loads a server and measures it. */
export async function runLoad (plan: LoadPlan): Promise<LoadResult> {
  const { clock = realClock, signal = new AbortController().signal } = plan
  const requests = requestsOf(plan)
  const concurrency = 'concurrency' in plan.arrivals ? plan.arrivals.concurrency : Math.min(plan.warmup, 16)
  if (plan.warmup > 0) {
    await closedLoop(new Series(plan, clock, signal), requests, concurrency, { requests: plan.warmup, seconds: null })
  }
  const run = new Series(plan, clock, signal)
  const limits = { requests: plan.requests, seconds: plan.seconds }
  const cpu = process.cpuUsage()
  const wall = performance.now()
  if ('rate' in plan.arrivals) await openLoop(run, requests, plan.arrivals.rate, limits, plan.seed)
  else await closedLoop(run, requests, concurrency, limits)
  const { user, system } = process.cpuUsage(cpu)
  return run.result((user + system) / 1000 / Math.max(performance.now() - wall, 1e-9))
}

/** The same requests for the same seed, however they are sent. */
export function* requestsOf (plan: LoadPlan): Generator<LoadRequest, never, undefined> {
  const [prompts, outputs] = [randomFrom(plan.seed, PROMPT_LENGTHS!), randomFrom(plan.seed, OUTPUT_LENGTHS!)]
  const { model, samples, temperature, ignoreEos } = plan
  for (let index = 0;; index++) {
    const ids = promptIds(plan.seed, index, drawLength(plan.prompt, prompts), plan.sharedPrefix, plan.ids)
    const maxTokens = drawLength(plan.output, outputs)
    yield { promptIds: ids, promptText: () => promptText(ids), maxTokens, samples, temperature, ignoreEos, model }
  }
}

interface Limits {
  requests: number | null
  seconds: number | null
}

async function closedLoop (
  run: Series,
  requests: Iterator<LoadRequest, never>,
  concurrency: number,
  limits: Limits
): Promise<void> {
  const { now } = run.clock
  const end = limits.seconds === null ? Infinity : now() + limits.seconds * 1000
  const client = async (): Promise<void> => {
    while (!run.signal.aborted && run.sent < (limits.requests ?? Infinity)) {
      const start = now()
      if (start >= end) return
      await run.send(requests.next().value, start)
    }
  }
  await Promise.all(Array.from({ length: concurrency }, client))
}

/**
 * Sends at the times of a Poisson process, whether or not earlier requests have ended. Waiting counts from the time
 * that a request was due, so a program that falls behind does not hide it.
 */
async function openLoop (
  run: Series,
  requests: Iterator<LoadRequest, never>,
  rate: number,
  limits: Limits,
  seed: number
): Promise<void> {
  const { clock, signal } = run
  const start = clock.now()
  const end = limits.seconds === null ? Infinity : start + limits.seconds * 1000
  const running: Promise<void>[] = []
  let sent = 0
  for (const offset of arrivals(rate, seed)) {
    const due = start + offset
    if (due >= end || sent >= (limits.requests ?? Infinity)) break
    await clock.until(due, signal)
    if (signal.aborted) break
    sent++
    running.push(run.send(requests.next().value, due))
  }
  await Promise.all(running)
}

/** Milliseconds from the start to each arrival of a Poisson process; the first one is at 0. */
export function* arrivals (rate: number, seed: number): Generator<number, never, undefined> {
  const random = randomFrom(seed, ARRIVALS!)
  for (let at = 0;; at += exponential(random, 1000 / rate)) yield at
}
