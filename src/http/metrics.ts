import { collectDefaultMetrics, Counter, Gauge, Histogram, Registry } from 'prom-client'
import type { AdapterReport } from '../contract/adapters.ts'
import type { RolloutEngine, StartTimes } from '../contract/rollout-engine.ts'
import type { Sample } from './generation/sample.ts'
import type { WriteReport } from '../contract/weight-source.ts'
import { AdapterMetrics } from './adapter-metrics.ts'
import { LatencyCounts } from './latency-counts.ts'
import { chooseMetricNames, familiesOf, METRIC_NAMES } from './metric-families.ts'
import type { MetricNames } from './metric-families.ts'
import type { KeptSamples } from './samples/kept-samples.ts'
import type { TruthMeter } from './samples/truth-meter.ts'
import { truthMetrics } from './samples/truth-metrics.ts'
import { setMetrics } from './set-metrics.ts'
import { speculationMetrics } from './speculation-metrics.ts'
import { REQUEST_BUCKETS, StreamingMetrics, TOKEN_BUCKETS } from './streaming-metrics.ts'

const UPDATE_BUCKETS = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300]

export interface UpdateListener {
  /** `began`: by `performance.now()`. */
  updated: (report: WriteReport, began: number) => void
  failed: (isTorn: boolean, began: number) => void
}

/**
 * Prometheus metrics of one plugin instance, in registries of its own, so that the host's default registry is not
 * touched.
 */
export class Metrics {
  readonly contentType = Registry.PROMETHEUS_CONTENT_TYPE
  /** refit's own names. */
  readonly #refit = new Registry()
  /** The same times between tokens as in `refit:inter_token_latency_seconds`, for the page. */
  readonly gaps = new LatencyCounts()
  readonly #streaming = new StreamingMetrics()
  /** The process, and the families under the names that were chosen. */
  readonly #scraped: Registry[]
  readonly #engine: RolloutEngine
  readonly #finished: Counter<'finished_reason'>
  readonly #firstToken: Histogram
  readonly #interToken: Histogram
  readonly #request: Histogram
  readonly #decode: Histogram
  readonly #perToken: Histogram
  readonly #queue: Histogram
  readonly #prefill: Histogram
  readonly #updates: Counter<'outcome'>
  readonly #updateSeconds: Histogram<'phase'>
  readonly #updateBytes: Counter<'transport'>
  readonly #adapters: AdapterMetrics | undefined
  readonly #listeners: UpdateListener[] = []
  #unwatch: () => void = () => {}
  #pausedMs = 0
  #pausedSince: number | null = null

  constructor (engine: RolloutEngine, names: ReadonlySet<MetricNames> = chooseMetricNames()) {
    this.#engine = engine
    const registers = [this.#refit]
    this.#refit.setDefaultLabels({ model_name: engine.info.servedModelName })
    this.#readEngine()

    this.#finished = new Counter({
      name: 'refit:request_success_total',
      help: 'Requests that ended, by reason',
      labelNames: ['finished_reason'],
      registers
    })
    this.#firstToken = new Histogram({
      name: 'refit:time_to_first_token_seconds',
      help: 'From the request to its first token',
      buckets: REQUEST_BUCKETS,
      registers
    })
    this.#interToken = new Histogram({
      name: 'refit:inter_token_latency_seconds',
      help: 'From one token to the next',
      buckets: TOKEN_BUCKETS,
      registers
    })
    this.#request = new Histogram({
      name: 'refit:e2e_request_latency_seconds',
      help: 'From the request to its last token',
      buckets: REQUEST_BUCKETS,
      registers
    })
    this.#decode = new Histogram({
      name: 'refit:request_decode_time_seconds',
      help: 'From the first token to the last',
      buckets: REQUEST_BUCKETS,
      registers
    })
    this.#perToken = new Histogram({
      name: 'refit:request_time_per_output_token_seconds',
      help: "Mean time from one of a request's tokens to the next, once per request",
      buckets: TOKEN_BUCKETS,
      registers
    })
    this.#queue = new Histogram({
      name: 'refit:request_queue_time_seconds',
      help: "From the request's arrival in the scheduler until it first ran",
      buckets: REQUEST_BUCKETS,
      registers
    })
    this.#prefill = new Histogram({
      name: 'refit:request_prefill_time_seconds',
      help: 'From when the request first ran to its first token',
      buckets: REQUEST_BUCKETS,
      registers
    })
    this.#updates = new Counter({
      name: 'refit:weight_updates_total',
      help: 'Weight updates, by outcome',
      labelNames: ['outcome'],
      registers
    })
    this.#updateSeconds = new Histogram({
      name: 'refit:weight_update_seconds',
      help: 'Time of weight updates, by phase',
      labelNames: ['phase'],
      buckets: UPDATE_BUCKETS,
      registers
    })
    this.#updateBytes = new Counter({
      name: 'refit:weight_update_bytes_total',
      help: 'Bytes taken from sources, by transport',
      labelNames: ['transport'],
      registers
    })
    for (const outcome of ['success', 'refused', 'torn']) this.#updates.inc({ outcome }, 0)
    for (const reason of ['stop', 'length', 'abort']) this.#finished.inc({ finished_reason: reason }, 0)
    if (engine.adapters !== undefined) this.#adapters = new AdapterMetrics(this.#refit, engine.adapters)
    speculationMetrics(this.#refit, engine)
    this.#unwatch = setMetrics(this.#refit, engine)
    this.#scraped = this.#registries(names)
  }

  /** refit's own names, for telemetry. */
  get registry (): Registry {
    return this.#refit
  }

  /** The metrics in Prometheus's text format. */
  async text (): Promise<string> {
    return (await Promise.all(this.#scraped.map(async registry => await registry.metrics()))).join('\n')
  }

  /**
   * `before`: the sample's count of tokens and the time of its last one before the event that it just received.
   * `isStreaming`: the client receives events.
   */
  observeEvent (sample: Sample, before: { tokens: number, at: number }, isStreaming: boolean): void {
    const count = sample.tokens.length - before.tokens
    if (count > 0 && before.tokens === 0) {
      const seconds = (sample.firstTokenAt! - sample.startedAt) / 1000
      this.#firstToken.observe(seconds)
      this.#streaming.firstToken(seconds, isStreaming)
    } else if (count > 0) {
      const ms = (sample.lastTokenAt - before.at) / count
      this.#interToken.observe(ms / 1000)
      this.gaps.add(ms, count)
    }
    if (sample.finish === null) return
    this.#finished.inc({ finished_reason: sample.finish.type })
    this.#request.observe(sample.seconds)
    this.#streaming.ended(sample, isStreaming)
    if (sample.firstTokenAt === null) return
    this.#decode.observe((sample.lastTokenAt - sample.firstTokenAt) / 1000)
    const { secondsPerToken } = sample
    if (secondsPerToken !== null) this.#perToken.observe(secondsPerToken)
  }

  /** Called once per request, when its prefill is done. */
  observeStart ({ queueMs, prefillMs }: StartTimes): void {
    this.#queue.observe(queueMs / 1000)
    this.#prefill.observe(prefillMs / 1000)
  }

  /** The listener hears of each update after its end. */
  watchUpdates (listener: UpdateListener): void {
    this.#listeners.push(listener)
  }

  observeUpdate (report: WriteReport, began: number): void {
    for (const { updated } of this.#listeners) updated(report, began)
    this.#updates.inc({ outcome: 'success' })
    this.#updateBytes.inc({ transport: report.source }, report.bytes)
    for (const [phase, ms] of Object.entries(report.ms)) this.#updateSeconds.observe({ phase }, ms / 1000)
  }

  observeFailedUpdate (torn: boolean, began: number): void {
    for (const { failed } of this.#listeners) failed(torn, began)
    this.#updates.inc({ outcome: torn ? 'torn' : 'refused' })
  }

  observeAdapter (report: AdapterReport): void {
    this.#adapters?.loaded(report)
  }

  observeFailedAdapter (): void {
    this.#adapters?.failed()
  }

  /** Counts handles of trainers' memory: every opened file is closed again, and every reference is given back. */
  watchHandles (counts: Readonly<{ handlesReleased: number, filesOpened: number, filesClosed: number }>): void {
    this.#counter(
      'tensor_shares_released_total',
      'References to memory of tensor senders that were given back',
      () => counts.handlesReleased
    )
    this.#counter(
      'tensor_files_opened_total',
      'Files of shared memory, and descriptors of expandable segments, that were opened for updates from tensors',
      () => counts.filesOpened
    )
    this.#counter('tensor_files_closed_total', 'Opened files that were closed again', () => counts.filesClosed)
  }

  /** Memory that holds uploads until they are written. */
  watchUploads (uploads: { staging: { bytes: { live: number, kept: number } } }): void {
    this.#gauge('upload_staging_bytes', 'Memory in use by uploads under way', () => uploads.staging.bytes.live)
    this.#gauge(
      'upload_staging_kept_bytes',
      'Free memory that is kept for a while for the next upload',
      () => uploads.staging.bytes.kept
    )
  }

  /** Process groups of trainers. */
  watchGroups (
    groups: {
      list: readonly unknown[]
      counts: Readonly<{ joined: number, failed: number, bytesReceived: number, bytesDropped: number }>
    }
  ): void {
    this.#gauge('weight_groups', 'Process groups of trainers that this engine is in', () => groups.list.length)
    this.#counter('weight_groups_joined_total', 'Process groups that were joined', () => groups.counts.joined)
    this.#counter('weight_groups_failed_total', 'Process groups that failed', () => groups.counts.failed)
    this.#counter(
      'group_received_bytes_total',
      'Bytes of weights that were received through process groups',
      () => groups.counts.bytesReceived
    )
    this.#counter(
      'group_dropped_bytes_total',
      'Received bytes that were dropped because their requests had been refused',
      () => groups.counts.bytesDropped
    )
  }

  /** Tensors that are kept between requests because trainers requested it. */
  watchKept (stats: () => { names: number, bytes: number }): void {
    this.#gauge(
      'kept_tensor_names',
      'Names under which tensors of trainers are kept open between updates',
      () => stats().names
    )
    this.#gauge('kept_tensor_bytes', 'Bytes of the tensors that are kept', () => stats().bytes)
  }

  /** Kept samples, and the differences between trainers' logprobs and the engine's. */
  watchTruth (meter: TruthMeter, kept: KeptSamples): void {
    truthMetrics(this.#refit, meter, kept)
  }

  pauseBegan (): void {
    this.#pausedSince ??= performance.now()
  }

  pauseEnded (): void {
    if (this.#pausedSince !== null) this.#pausedMs += performance.now() - this.#pausedSince
    this.#pausedSince = null
  }

  close (): void {
    this.#unwatch()
    for (const registry of this.#scraped) registry.clear()
  }

  #registries (names: ReadonlySet<MetricNames>): Registry[] {
    const ofProcess = new Registry()
    ofProcess.setDefaultLabels({ model_name: this.#engine.info.servedModelName })
    collectDefaultMetrics({ register: ofProcess })
    const chosen = METRIC_NAMES.filter(name => names.has(name))
    return [
      ofProcess,
      ...chosen.map(name => name === 'refit' ? this.#refit : this.#families(name))
    ]
  }

  #families (server: 'vllm' | 'sglang'): Registry {
    const sources = server === 'sglang' ? [this.#streaming.registry, this.#refit] : [this.#refit]
    return familiesOf(server, sources, this.#engine)
  }

  /** Gauges that read the engine when they are scraped. */
  #readEngine (): void {
    const engine = this.#engine
    this.#gauge('num_requests_running', 'Requests that generate', () => engine.stats.running)
    this.#gauge('num_requests_waiting', 'Requests that wait to run', () => engine.stats.queued)
    this.#gauge(
      'kv_cache_usage_perc',
      'Part of the KV cache in use by requests, 0 to 1',
      () => ratio(engine.stats.usedTokens, engine.stats.totalTokens)
    )
    this.#gauge(
      'weight_version',
      'The digits at the end of the weight version (42 of "step-42"); NaN if there are none',
      () => trailingNumber(engine.weightVersion)
    )
    this.#gauge('weight_epoch', 'Increases with every write of weights', () => engine.epoch)
    this.#gauge('weights_torn', '1 while weights are torn', () => Number(engine.weights.state === 'torn'))
    this.#gauge(
      'weight_transaction_open',
      "1 while a weight transaction, or a trainer's begin, is open",
      () => Number(engine.transactions.currentId !== null)
    )
    this.#gauge(
      'engine_asleep',
      '1 while memory of any kind is released',
      () => Number(Object.keys(engine.releasedMemory).length > 0)
    )
    this.#releasedMemory()
    this.#gauge('generation_paused', '1 while generation is paused', () => Number(engine.stats.paused !== null))
    this.#gauge('engine_step_seconds', 'Time of the last step', () => engine.stats.stepMs / 1000)
    if (engine.mappings !== undefined) {
      this.#counter(
        'cuda_segments_opened_total',
        'Segments of other processes on GPUs that were mapped for updates, counted for each rank',
        () => engine.mappings!.opened
      )
      this.#counter(
        'cuda_segments_closed_total',
        'Mapped segments that were unmapped again; kept segments stay mapped',
        () => engine.mappings!.closed
      )
    }
    this.#counter('prompt_tokens_total', 'Prompt tokens', () => engine.stats.promptTokens)
    this.#counter('generation_tokens_total', 'Generated tokens', () => engine.stats.generationTokens)
    this.#counter(
      'prefix_cache_hits_total',
      'Prompt tokens taken from the prefix cache',
      () => engine.stats.prefixHitTokens
    )
    this.#counter('num_preemptions_total', 'Retractions of running requests', () => engine.stats.retractions)
    this.#counter('engine_steps_total', 'Forward steps', () => engine.stats.steps)
    this.#counter('generation_pause_seconds_total', 'Time spent paused through the pause endpoints', () => {
      return (this.#pausedMs + (this.#pausedSince === null ? 0 : performance.now() - this.#pausedSince)) / 1000
    })
  }

  #gauge (name: string, help: string, read: () => number): void {
    const gauge: Gauge = new Gauge({
      name: `refit:${name}`,
      help,
      registers: [this.#refit],
      collect: () => gauge.set(read())
    })
  }

  #releasedMemory (): void {
    const gauge: Gauge<'tag'> = new Gauge({
      name: 'refit:memory_released_bytes',
      help: 'Bytes given back to the system on request, by kind of memory',
      labelNames: ['tag'],
      registers: [this.#refit],
      collect: () => {
        for (const tag of ['weights', 'kv_cache', 'cuda_graph'] as const) {
          gauge.set(
            { tag },
            this.#engine.releasedMemory[tag] ?? 0
          )
        }
      }
    })
  }

  #counter (name: string, help: string, read: () => number): void {
    const counter: Counter = new Counter({
      name: `refit:${name}`,
      help,
      registers: [this.#refit],
      collect: () => {
        counter.reset()
        counter.inc(read())
      }
    })
  }
}

function ratio (part: number, whole: number): number {
  return whole === 0 ? 0 : part / whole
}

// NaN is Prometheus's value for "not a number"; a gauge without a value would be left out. The look-behind stops the
// regular expression from searching a long label again from each of its digits.
export function trailingNumber (version: string): number {
  return Number(/(?<!\d)\d+$/.exec(version)?.[0] ?? NaN)
}
