import { Counter, Gauge } from 'prom-client'
import type { Registry } from 'prom-client'
import type { KeptSamples } from './kept-samples.ts'
import type { Differences } from './difference-tally.ts'
import type { TruthMeter } from './truth-meter.ts'

/**
 * Families without a label for the version: a run has thousands. Counters cover all versions, and gauges the newest one
 * that was measured; `GET /truth` has the last versions one by one.
 */
export function truthMetrics (registry: Registry, meter: TruthMeter, kept: KeptSamples): void {
  const registers = [registry]
  const gauge = (name: string, help: string, read: () => number): void => {
    const own: Gauge = new Gauge({ name: `refit:${name}`, help, registers, collect: () => own.set(read()) })
  }
  const counter = (name: string, help: string, read: () => number): void => {
    const own: Counter = new Counter({
      name: `refit:${name}`,
      help,
      registers,
      collect: () => {
        own.reset()
        own.inc(read())
      }
    })
  }
  gauge('kept_samples', 'Finished samples that are kept for receipts and for the truth meter', () => kept.stats.samples)
  gauge('kept_sample_bytes', 'Memory of the kept samples', () => kept.stats.bytes)
  counter('truth_samples_total', "Samples that were compared with a trainer's logprobs", () => meter.samples)
  counter('truth_tokens_total', 'Their tokens', () => meter.all.tokens)
  counter(
    'truth_difference_sum_total',
    "Sum over these tokens of |trainer's logprob - the engine's|",
    () => meter.all.sum
  )
  counter('truth_kl_sum_total', 'Sum over these tokens of the estimate of KL(engine, trainer)', () => meter.all.klSum)
  counter(
    'truth_clipped_tokens_total',
    'Tokens that are more than twice as probable in the trainer',
    () => meter.all.clipped
  )
  counter('truth_warnings_total', 'Comparisons whose mean was above --truth-warn', () => meter.warnings)
  const newest = (name: string, help: string, read: (values: Differences) => number): void => {
    gauge(
      name,
      `${help}, of the newest weight version that was measured; NaN before`,
      () => meter.newest === null ? NaN : read(meter.newest)
    )
  }
  newest('truth_difference_mean', "Mean |trainer's logprob - the engine's|", ({ mean }) => mean)
  newest('truth_difference_p99', 'The same, 99th percentile', ({ p99 }) => p99)
  newest('truth_difference_max', 'The same, largest', ({ max }) => max)
  newest('truth_kl', 'Estimate of KL(engine, trainer) for a token', ({ kl }) => kl)
  newest(
    'truth_clipped_ratio',
    'Part of the tokens that are more than twice as probable in the trainer',
    ({ clipped }) => clipped
  )
}
