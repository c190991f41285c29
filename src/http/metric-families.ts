import { Registry } from 'prom-client'
import type { Metric, MetricValueWithName } from 'prom-client'
import type { Adapters } from '../contract/adapters.ts'
import type { EngineStats, RolloutEngine } from '../contract/rollout-engine.ts'
import { RefitError } from '../errors.ts'
import { slotsUsed } from './adapter-metrics.ts'

// vLLM's and SGLang's names for the metrics of src/http/metrics.ts. Trainers steer by them: prime-rl, for example, runs
// one episode at a time while it finds no `vllm:*`.

/** The sets of names that `--metric-names` chooses from. */
export const METRIC_NAMES = ['refit', 'vllm', 'sglang'] as const

export type MetricNames = (typeof METRIC_NAMES)[number]

/** The names that `--metric-names` chooses; none given: all. Throws CONFIG for an unknown name. */
export function chooseMetricNames (names: readonly string[] = []): ReadonlySet<MetricNames> {
  const known: readonly string[] = METRIC_NAMES
  const unknown = names.find(name => !known.includes(name))
  if (unknown !== undefined) {
    throw new RefitError(
      'CONFIG',
      `--metric-names: expected ${METRIC_NAMES.join(', ')}, got ${JSON.stringify(unknown)}`,
      { param: 'metricNames' }
    )
  }
  return new Set(names.length === 0 ? METRIC_NAMES : names as readonly MetricNames[])
}

type Labels = Record<string, string>
type Values = MetricValueWithName<string>[]

interface Sources {
  engine: RolloutEngine
  /** The requests that were aborted. */
  aborted: () => Promise<number>
}

/** A family that is computed when it is scraped. */
interface Computed {
  type: 'counter' | 'gauge'
  help: string
  labels?: Labels
  /** Engines that have it; default all. */
  isOn?: (engine: RolloutEngine) => boolean
  read: (sources: Sources) => Promise<number> | number | [Labels, number][]
}

/** Families by name, without the prefix. A string is the name of refit's family with the same values. */
type Families = Readonly<Record<string, Computed | string>>

interface Server {
  /** Labels of all families besides model_name. */
  labels: Labels
  families: Families
}

/** Only on an engine that guesses tokens. */
function ofDrafts (type: Computed['type'], help: string, read: (stats: EngineStats) => number): Computed {
  return { type, help, isOn: ({ info }) => info.speculative !== undefined, read: ({ engine }) => read(engine.stats) }
}

const VLLM: Server = {
  labels: { engine: '0' },
  families: {
    num_requests_running: 'num_requests_running',
    num_requests_waiting: 'num_requests_waiting',
    num_requests_waiting_by_reason: {
      type: 'gauge',
      help: 'Requests that wait to run; deferred: because generation is paused or memory is released',
      read: ({ engine }) => {
        const { queued, paused } = engine.stats
        const deferred = paused !== null || Object.keys(engine.releasedMemory).length > 0
        return [[{ reason: 'capacity' }, deferred ? 0 : queued], [{ reason: 'deferred' }, deferred ? queued : 0]]
      }
    },
    kv_cache_usage_perc: 'kv_cache_usage_perc',
    // vLLM's name before 0.10.
    gpu_cache_usage_perc: 'kv_cache_usage_perc',
    cache_config_info: {
      type: 'gauge',
      help: 'Size of the KV cache, in labels; always 1',
      read: ({ engine: { info: { kvTokens, pageSize } } }) => [[{
        kv_cache_size_tokens: String(kvTokens),
        ...pageSize === undefined
          ? {}
          : { block_size: String(pageSize), num_gpu_blocks: String(Math.floor(kvTokens / pageSize)) }
      }, 1]]
    },
    prefix_cache_queries_total: 'prompt_tokens_total',
    prefix_cache_hits_total: 'prefix_cache_hits_total',
    lora_requests_info: {
      type: 'gauge',
      help: 'Adapters of requests, in labels; the value is the time',
      read: ({ engine: { adapters } }) => {
        if (adapters === undefined) return []
        const used = adapters.list().filter(({ requests }) => requests > 0)
        const names = (resident: boolean): string =>
          used.filter(info => info.resident === resident).map(({ name }) => name).join(',')
        return [[{
          running_lora_adapters: names(true),
          waiting_lora_adapters: names(false),
          max_lora: String(adapters.limits.slots)
        }, Date.now() / 1000]]
      }
    },
    num_preemptions_total: 'num_preemptions_total',
    prompt_tokens_total: 'prompt_tokens_total',
    prompt_tokens_cached_total: 'prefix_cache_hits_total',
    generation_tokens_total: 'generation_tokens_total',
    spec_decode_num_drafts_total: ofDrafts('counter', 'Steps of a request with guessed tokens', ({ drafts }) => drafts),
    spec_decode_num_draft_tokens_total: ofDrafts(
      'counter',
      'Guessed tokens that were computed',
      ({ draftTokens }) => draftTokens
    ),
    spec_decode_num_accepted_tokens_total: ofDrafts(
      'counter',
      'Guessed tokens that the engine sampled itself',
      ({ acceptedTokens }) => acceptedTokens
    ),
    request_success_total: 'request_success_total',
    time_to_first_token_seconds: 'time_to_first_token_seconds',
    inter_token_latency_seconds: 'inter_token_latency_seconds',
    request_time_per_output_token_seconds: 'request_time_per_output_token_seconds',
    e2e_request_latency_seconds: 'e2e_request_latency_seconds',
    request_queue_time_seconds: 'request_queue_time_seconds',
    request_prefill_time_seconds: 'request_prefill_time_seconds',
    request_decode_time_seconds: 'request_decode_time_seconds'
  }
}

// SGLang puts the labels of ranks on the metrics of its scheduler only.
const RANKS: Labels = { tp_rank: '0', pp_rank: '0', moe_ep_rank: '0' }

function ofScheduler (type: Computed['type'], help: string, read: (engine: RolloutEngine) => number): Computed {
  return {
    type,
    help,
    labels: RANKS,
    read: ({ engine }) => {
      const { dataParallel } = engine.info
      return dataParallel === undefined ? read(engine) : [[{ dp_rank: String(dataParallel.rank) }, read(engine)]]
    }
  }
}

/** Absent on an engine without adapters. */
function ofPool (help: string, read: (adapters: Adapters) => number): Computed {
  return {
    type: 'gauge',
    help,
    labels: RANKS,
    read: ({ engine: { adapters } }) => adapters === undefined ? [] : [[{}, read(adapters)]]
  }
}

const SGLANG: Server = {
  labels: { engine_type: 'unified' },
  families: {
    num_running_reqs: ofScheduler('gauge', 'Requests that generate', ({ stats }) => stats.running),
    num_queue_reqs: ofScheduler('gauge', 'Requests that wait to run', ({ stats }) => stats.queued),
    gen_throughput: ofScheduler(
      'gauge',
      'Generated tokens per second over about the last second',
      ({ stats }) => stats.tokensPerSecond
    ),
    token_usage: ofScheduler(
      'gauge',
      'Part of the KV cache in use by requests, 0 to 1',
      ({ stats }) => ratio(stats.usedTokens, stats.totalTokens)
    ),
    num_used_tokens: ofScheduler('gauge', 'Tokens of the KV cache in use', ({ stats }) => stats.usedTokens),
    cache_hit_rate: ofScheduler(
      'gauge',
      'Part of all prompt tokens since the start that came from the prefix cache',
      ({ stats }) => ratio(stats.prefixHitTokens, stats.promptTokens)
    ),
    spec_accept_length: ofDrafts(
      'gauge',
      'Tokens of a step of a request with guessed tokens, since the start',
      ({ drafts, acceptedTokens }) => drafts === 0 ? 0 : 1 + acceptedTokens / drafts
    ),
    spec_accept_rate: ofDrafts(
      'gauge',
      'Part of all guessed tokens since the start that were right',
      ({ draftTokens, acceptedTokens }) => ratio(acceptedTokens, draftTokens)
    ),
    num_retracted_requests_total: ofScheduler(
      'counter',
      'Retractions of running requests',
      ({ stats }) => stats.retractions
    ),
    // One engine prefills and decodes, so the queues between the two are empty.
    num_prefill_bootstrap_queue_reqs: ofScheduler('gauge', 'Always 0: nothing is disaggregated', () => 0),
    num_prefill_inflight_queue_reqs: ofScheduler('gauge', 'Always 0: nothing is disaggregated', () => 0),
    num_decode_prealloc_queue_reqs: ofScheduler('gauge', 'Always 0: nothing is disaggregated', () => 0),
    num_decode_transfer_queue_reqs: ofScheduler('gauge', 'Always 0: nothing is disaggregated', () => 0),
    lora_pool_slots_used: ofPool('Slots that hold an adapter', slotsUsed),
    lora_pool_slots_total: ofPool('Slots for adapters', ({ limits }) => limits.slots),
    lora_pool_utilization: ofPool(
      'Part of the slots that hold an adapter, 0 to 1',
      adapters => ratio(slotsUsed(adapters), adapters.limits.slots)
    ),
    prompt_tokens_total: 'prompt_tokens_total',
    generation_tokens_total: 'generation_tokens_total',
    cached_tokens_total: {
      type: 'counter',
      help: 'Prompt tokens taken from the prefix cache',
      labels: { cache_source: 'device' },
      read: ({ engine }) => engine.stats.prefixHitTokens
    },
    num_requests_total: 'num_requests_total',
    num_aborted_requests_total: {
      type: 'counter',
      help: 'Requests that were aborted',
      read: async ({ aborted }) => await aborted()
    },
    time_to_first_token_seconds: 'time_to_first_token_seconds',
    inter_token_latency_seconds: 'inter_token_latency_seconds',
    request_time_per_output_token_seconds: 'request_time_per_output_token_seconds',
    // SGLang's name before 0.5.
    time_per_output_token_seconds: 'request_time_per_output_token_seconds',
    e2e_request_latency_seconds: 'e2e_request_latency_seconds',
    queue_time_seconds: 'request_queue_time_seconds'
  }
}

const SERVERS = { vllm: VLLM, sglang: SGLANG }

/**
 * A registry with refit's families under another server's names; it reads them when it is scraped. `from`: where they
 * are; a family that several registries have is taken from the first.
 */
export function familiesOf (
  server: keyof typeof SERVERS,
  from: readonly Registry[],
  engine: RolloutEngine
): Registry {
  const { labels, families } = SERVERS[server]
  const registry = new Registry()
  registry.setDefaultLabels({ model_name: engine.info.servedModelName, ...labels })
  const sources: Sources = { engine, aborted: async () => await countAborted(from) }
  for (const [short, family] of Object.entries(families)) {
    if (typeof family !== 'string' && family.isOn?.(engine) === false) continue
    const name = `${server}:${short}`
    register(registry, typeof family === 'string' ? renamed(name, family, from) : computed(name, family, sources))
  }
  return registry
}

/** A metric of `registries` under another name. */
function renamed (name: string, from: string, registries: readonly Registry[]): Scraped {
  const source = sourceOf(registries, from)
  return {
    name,
    get: async () => {
      const { values, ...rest } = await source.get()
      return {
        ...rest,
        name,
        values: (values as Values).map(({ metricName, ...value }) => ({
          ...value,
          // A histogram's series are named after it: name_bucket, name_sum, name_count.
          ...metricName === undefined ? {} : { metricName: name + metricName.slice(`refit:${from}`.length) }
        }))
      }
    }
  }
}

function computed (name: string, { type, help, labels = {}, read }: Computed, sources: Sources): Scraped {
  return {
    name,
    get: async () => {
      const result = await read(sources)
      const series: [Labels, number][] = typeof result === 'number' ? [[{}, result]] : result
      return { name, type, help, values: series.map(([own, value]) => ({ value, labels: { ...labels, ...own } })) }
    }
  }
}

async function countAborted (registries: readonly Registry[]): Promise<number> {
  const { values } = await sourceOf(registries, 'request_success_total').get()
  return values.find(({ labels }) => labels['finished_reason'] === 'abort')?.value ?? 0
}

function sourceOf (registries: readonly Registry[], name: string): Metric {
  for (const registry of registries) {
    const source = registry.getSingleMetric(`refit:${name}`)
    if (source !== undefined) return source
  }
  throw new Error(`no metric is named refit:${name}`)
}

/** The part of a metric that a registry reads. */
interface Scraped {
  name: string
  get: () => Promise<object>
}

function register (registry: Registry, metric: Scraped): void {
  registry.registerMetric(metric as unknown as Metric)
}

function ratio (part: number, whole: number): number {
  return whole === 0 ? 0 : part / whole
}
