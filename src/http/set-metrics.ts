import { Counter, Gauge, Histogram } from 'prom-client'
import type { Registry } from 'prom-client'
import type { RolloutEngine } from '../contract/rollout-engine.ts'
import type { WeightSets } from '../contract/weight-update.ts'

const BOUNDARY_BUCKETS = [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10]

type State = WeightSets['shadow']['state']

// A record, because the compiler then requires every state.
const STATES: Readonly<Record<State, true>> = {
  absent: true,
  idle: true,
  receiving: true,
  catching_up: true,
  old: true
}

/**
 * Metrics of the two sets of weights; none for an engine with one set. The returned function ends the observation of
 * swaps.
 */
export function setMetrics (
  registry: Registry,
  engine: Pick<RolloutEngine, 'setMeter' | 'weightSets'>
): () => void {
  const { setMeter: meter } = engine
  if (meter === undefined) return () => {}
  const registers = [registry]
  const state: Gauge<'state'> = new Gauge({
    name: 'refit:weight_shadow_state',
    help: '1 for the state of the second set of weights, 0 for its other states',
    labelNames: ['state'],
    registers,
    collect: () => {
      const now = engine.weightSets?.shadow.state
      for (const name of Object.keys(STATES)) state.set({ state: name }, Number(name === now))
    }
  })
  const old: Gauge = new Gauge({
    name: 'refit:requests_on_old_weights',
    help: 'Requests that finish on the weights before the last update (on_running "finish_old")',
    registers,
    collect: () => {
      old.set(engine.weightSets?.oldRequests ?? 0)
    }
  })
  const counter = <L extends string>(
    name: string,
    help: string,
    label: L,
    read: () => Readonly<Record<string, number>>
  ): void => {
    const own: Counter<L> = new Counter({
      name: `refit:${name}`,
      help,
      labelNames: [label],
      registers,
      collect: () => {
        own.reset()
        for (const [value, count] of Object.entries(read())) own.inc({ [label]: value } as Record<L, string>, count)
      }
    })
  }
  counter(
    'weight_swaps_total',
    'Updates and transactions that came into use, by mode: swap (the sets changed places) or in_place',
    'mode',
    () => meter.counts.updates
  )
  counter(
    'weight_shadow_bytes_total',
    'Bytes that went into the second set, by kind: received from sources, or caught_up (copied from the set in use, ' +
      'added up over ranks)',
    'kind',
    () => meter.counts.bytes
  )
  const boundary = new Histogram({
    name: 'refit:weight_swap_boundary_seconds',
    help: 'From when all bytes were in the second set until steps used it',
    buckets: BOUNDARY_BUCKETS,
    registers
  })
  return meter.watch(seconds => {
    boundary.observe(seconds)
  })
}
