import { collectDefaultMetrics, Counter, Gauge, Histogram, Registry } from 'prom-client'
import { trailingNumber } from '../http/metrics.ts'
import type { Fleet } from './fleet.ts'
import { failureOf } from './replies.ts'
import type { Outcome } from './replies.ts'
import type { Worker, WorkerState } from './worker.ts'

const SECONDS = [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300]
const STATES: readonly WorkerState[] = ['joining', 'ready', 'stale', 'down', 'draining']

/** Prometheus metrics of a gateway. Each engine serves its own. */
export class GatewayMetrics {
  readonly registry = new Registry()
  readonly #requests: Counter<'worker' | 'status'>
  readonly #retries: Counter<'worker'>
  readonly #fanOut: Histogram<'path'>
  readonly #failures: Counter<'worker'>
  readonly #updates: Counter<'outcome'>
  readonly #catchUps: Counter<'from' | 'outcome'>
  readonly #catchUpSeconds: Histogram

  constructor (fleet: Fleet) {
    const registers = [this.registry]
    collectDefaultMetrics({ register: this.registry })
    this.#requests = new Counter({
      name: 'refit:gateway_requests_total',
      help: 'Requests to one engine, by engine and status of its reply; "failed": it sent none',
      labelNames: ['worker', 'status'],
      registers
    })
    this.#retries = new Counter({
      name: 'refit:gateway_retries_total',
      help: 'Requests that were sent to another engine because this one failed or was not ready',
      labelNames: ['worker'],
      registers
    })
    this.#fanOut = new Histogram({
      name: 'refit:gateway_fan_out_seconds',
      help: 'Time from a call for all engines to the last reply, by route',
      labelNames: ['path'],
      buckets: SECONDS,
      registers
    })
    this.#failures = new Counter({
      name: 'refit:gateway_fan_out_failures_total',
      help: 'Replies to such calls that were failures or were lost, by engine',
      labelNames: ['worker'],
      registers
    })
    this.#updates = new Counter({
      name: 'refit:gateway_weight_updates_total',
      help: 'Calls that change weights or their label, by how many engines took them',
      labelNames: ['outcome'],
      registers
    })
    this.#catchUps = new Counter({
      name: 'refit:gateway_fills_total',
      help: 'Loads of the current weights into an engine, by origin',
      labelNames: ['from', 'outcome'],
      registers
    })
    this.#catchUpSeconds = new Histogram({
      name: 'refit:gateway_fill_seconds',
      help: 'Time of such loads that succeeded',
      buckets: SECONDS,
      registers
    })
    for (const outcome of ['all', 'some', 'none']) this.#updates.inc({ outcome }, 0)
    this.#readFleet(fleet)
  }

  answered (worker: Worker, status: number | 'failed'): void {
    this.#requests.inc({ worker: worker.url, status: String(status) })
  }
  retried (worker: Worker): void {
    this.#retries.inc({ worker: worker.url })
  }

  /** `path`: the route's pattern, because ids in it would make a new series each. */
  fannedOut (path: string, seconds: number, outcomes: readonly Outcome[], isUpdate: boolean): void {
    this.#fanOut.observe({ path }, seconds)
    const failed = outcomes.filter(outcome => failureOf(outcome) !== null)
    for (const { worker } of failed) this.#failures.inc({ worker: worker.url })
    if (isUpdate) {
      this.#updates.inc({
        outcome: failed.length === 0 && outcomes.length > 0 ? 'all' : failed.length < outcomes.length ? 'some' : 'none'
      })
    }
  }

  caughtUp (from: 'disk' | 'peer', isDone: boolean, seconds: number): void {
    this.#catchUps.inc({ from, outcome: isDone ? 'success' : 'failed' })
    if (isDone) this.#catchUpSeconds.observe(seconds)
  }

  close (): void {
    this.registry.clear()
  }

  /** Gauges are read from the fleet at each scrape, and engines that were removed leave no series. */
  #readFleet (fleet: Fleet): void {
    const registers = [this.registry]
    const perWorker = (name: string, help: string, read: (worker: Worker) => number): void => {
      const gauge: Gauge<'worker'> = new Gauge({
        name: `refit:gateway_${name}`,
        help,
        labelNames: ['worker'],
        registers,
        collect: () => {
          gauge.reset()
          for (const worker of fleet.list) gauge.set({ worker: worker.url }, read(worker))
        }
      })
    }
    perWorker('requests_in_flight', 'Requests under way on an engine through this gateway', ({ load }) => load)
    perWorker('worker_ready', '1 while requests go to the engine', ({ state }) => Number(state === 'ready'))
    perWorker(
      'worker_weight_version',
      'The digits at the end of its weight label; NaN if there are none',
      ({ facts }) => trailingNumber(facts?.version ?? '')
    )
    const states: Gauge<'state'> = new Gauge({
      name: 'refit:gateway_workers',
      help: 'Engines, by state',
      labelNames: ['state'],
      registers,
      collect: () => {
        for (const state of STATES) states.set({ state }, fleet.list.filter(worker => worker.state === state).length)
      }
    })
    const gauge = (name: string, help: string, read: () => number): void => {
      const one: Gauge = new Gauge({
        name: `refit:gateway_${name}`,
        help,
        registers,
        collect: () => {
          one.set(read())
        }
      })
    }
    gauge(
      'weight_version',
      'The digits at the end of the label of the current weights',
      () => trailingNumber(fleet.version ?? '')
    )
    gauge('paused', '1 while generation is paused through this gateway', () => Number(fleet.paused))
    const updates: Counter = new Counter({
      name: 'refit:gateway_weights_changed_total',
      help: 'Updates that at least one engine took',
      registers,
      collect: () => {
        updates.reset()
        updates.inc(fleet.updates)
      }
    })
  }
}
