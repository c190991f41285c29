import { CHOSEN, percentile, perSecond } from './board.ts'
import type { Board } from './board.ts'

const at = (metric: string, more = ''): string => `${metric}{${CHOSEN}${more}}`
const per = (label: string): string => `{{instance}} {{${label}}}`
const ONE = '{{instance}}'
const refusals = (counter: string): string => `sum by (instance, code) (increase(${at(counter)}[5m]))`

const engine: Board = {
  uid: 'refit-engine',
  title: 'refit: engine',
  description: 'Requests, tokens, latencies and memory of refit servers.',
  instances: 'refit:num_requests_running',
  rows: [
    {
      title: 'Requests',
      panels: [
        { title: 'Running', queries: [[at('refit:num_requests_running'), ONE]] },
        { title: 'Waiting', queries: [[at('refit:num_requests_waiting'), ONE]] },
        {
          title: 'Ended, by reason',
          unit: 'reqps',
          queries: [[
            `sum by (instance, finished_reason) (rate(${at('refit:request_success_total')}[$__rate_interval]))`,
            per('finished_reason')
          ]]
        },
        {
          title: 'Refused or failed, by code',
          help: 'In the last five minutes.',
          queries: [[refusals('refit:requests_refused_total'), per('code')]]
        }
      ]
    },
    {
      title: 'Tokens',
      panels: [
        { title: 'Generated tokens per second', queries: [[perSecond('refit:generation_tokens_total'), ONE]] },
        { title: 'Prompt tokens per second', queries: [[perSecond('refit:prompt_tokens_total'), ONE]] },
        {
          title: 'Prompt tokens from the prefix cache',
          unit: 'percentunit',
          queries: [[
            `${perSecond('refit:prefix_cache_hits_total')} / ${perSecond('refit:prompt_tokens_total')}`,
            ONE
          ]]
        }
      ]
    },
    {
      title: 'Latency',
      panels: [
        {
          title: 'Time to first token',
          unit: 's',
          queries: [
            [percentile(0.5, 'refit:time_to_first_token_seconds'), `p50 ${ONE}`],
            [percentile(0.99, 'refit:time_to_first_token_seconds'), `p99 ${ONE}`]
          ]
        },
        {
          title: 'From one token to the next',
          unit: 's',
          help: 'An update that stops generation shows in the p99.',
          queries: [
            [percentile(0.5, 'refit:inter_token_latency_seconds'), `p50 ${ONE}`],
            [percentile(0.99, 'refit:inter_token_latency_seconds'), `p99 ${ONE}`]
          ]
        },
        {
          title: 'Whole request',
          unit: 's',
          queries: [
            [percentile(0.5, 'refit:e2e_request_latency_seconds'), `p50 ${ONE}`],
            [percentile(0.99, 'refit:e2e_request_latency_seconds'), `p99 ${ONE}`]
          ]
        },
        { title: 'Queue', unit: 's', queries: [[percentile(0.99, 'refit:request_queue_time_seconds'), `p99 ${ONE}`]] },
        {
          title: 'Prefill',
          unit: 's',
          queries: [[percentile(0.99, 'refit:request_prefill_time_seconds'), `p99 ${ONE}`]]
        },
        {
          title: 'Decode',
          unit: 's',
          queries: [[percentile(0.99, 'refit:request_decode_time_seconds'), `p99 ${ONE}`]]
        }
      ]
    },
    {
      title: 'Engine',
      panels: [
        { title: 'KV cache in use', unit: 'percentunit', queries: [[at('refit:kv_cache_usage_perc'), ONE]] },
        { title: 'Retractions per second', queries: [[perSecond('refit:num_preemptions_total'), ONE]] },
        { title: 'Time of the last step', unit: 's', queries: [[at('refit:engine_step_seconds'), ONE]] },
        { title: 'Memory of the process', unit: 'bytes', queries: [[at('process_resident_memory_bytes'), ONE]] },
        { title: 'Memory of kept samples', unit: 'bytes', queries: [[at('refit:kept_sample_bytes'), ONE]] },
        {
          title: 'Event loop delay, p99',
          unit: 's',
          queries: [[at('nodejs_eventloop_lag_p99_seconds', ',model_name!=""'), ONE]]
        },
        {
          title: 'Released memory',
          unit: 'bytes',
          queries: [[at('refit:memory_released_bytes'), per('tag')]]
        }
      ]
    }
  ]
}

const updates: Board = {
  uid: 'refit-updates',
  title: 'refit: weight updates',
  description: 'Versions, updates and their phases, process groups, the truth meter and adapters.',
  instances: 'refit:weight_epoch',
  rows: [
    {
      title: 'State',
      panels: [
        {
          title: 'Version',
          kind: 'stat',
          unit: 'none',
          width: 6,
          help: 'The digits at the end of the label.',
          queries: [[at('refit:weight_version'), ONE]]
        },
        { title: 'Torn', kind: 'stat', width: 6, queries: [[at('refit:weights_torn'), ONE]] },
        { title: 'Paused', kind: 'stat', width: 6, queries: [[at('refit:generation_paused'), ONE]] },
        { title: 'Asleep', kind: 'stat', width: 6, queries: [[at('refit:engine_asleep'), ONE]] }
      ]
    },
    {
      title: 'Updates',
      panels: [
        { title: 'Version over time', unit: 'none', queries: [[at('refit:weight_version'), ONE]] },
        {
          title: 'Updates, by outcome',
          help: 'In the last five minutes.',
          queries: [[
            `sum by (instance, outcome) (increase(${at('refit:weight_updates_total')}[5m]))`,
            per('outcome')
          ]]
        },
        {
          title: 'Bytes per second, by transport',
          unit: 'Bps',
          queries: [[
            `sum by (instance, transport) (rate(${at('refit:weight_update_bytes_total')}[$__rate_interval]))`,
            per('transport')
          ]]
        },
        {
          title: 'Time of updates',
          unit: 's',
          queries: [
            [percentile(0.5, 'refit:weight_update_seconds', ',phase="total"'), `p50 ${ONE}`],
            [percentile(0.99, 'refit:weight_update_seconds', ',phase="total"'), `p99 ${ONE}`]
          ]
        },
        {
          title: 'Mean time of each phase',
          unit: 's',
          help: 'plan: names become copies. gate: until generation has stopped. write: the copies.',
          queries: [[
            `sum by (phase) (rate(${at('refit:weight_update_seconds_sum', ',phase!="total"')}[$__rate_interval])) / ` +
            `sum by (phase) (rate(${at('refit:weight_update_seconds_count', ',phase!="total"')}[$__rate_interval]))`,
            '{{phase}}'
          ]]
        },
        {
          title: 'Part of the time that generation was paused',
          unit: 'percentunit',
          queries: [[perSecond('refit:generation_pause_seconds_total'), ONE]]
        },
        { title: 'Open transactions', queries: [[at('refit:weight_transaction_open'), ONE]] }
      ]
    },
    {
      title: 'Second set of weights',
      panels: [
        { title: 'State of the second set', queries: [[`${at('refit:weight_shadow_state')} == 1`, per('state')]] },
        { title: 'Requests that finish on old weights', queries: [[at('refit:requests_on_old_weights'), ONE]] },
        {
          title: 'Updates that came into use, by mode',
          help: 'In the last five minutes.',
          queries: [[`sum by (instance, mode) (increase(${at('refit:weight_swaps_total')}[5m]))`, per('mode')]]
        },
        {
          title: 'Bytes into the second set',
          unit: 'Bps',
          queries: [[
            `sum by (instance, kind) (rate(${at('refit:weight_shadow_bytes_total')}[$__rate_interval]))`,
            per('kind')
          ]]
        },
        {
          title: 'From the last byte to the swap',
          unit: 's',
          queries: [
            [percentile(0.5, 'refit:weight_swap_boundary_seconds'), `p50 ${ONE}`],
            [percentile(0.99, 'refit:weight_swap_boundary_seconds'), `p99 ${ONE}`]
          ]
        }
      ]
    },
    {
      title: 'Transports',
      panels: [
        { title: 'Process groups', queries: [[at('refit:weight_groups'), ONE]] },
        {
          title: 'Broadcast bytes',
          unit: 'Bps',
          queries: [
            [perSecond('refit:group_received_bytes_total'), `received ${ONE}`],
            [perSecond('refit:group_dropped_bytes_total'), `dropped ${ONE}`]
          ]
        },
        { title: 'Process groups that failed', queries: [[perSecond('refit:weight_groups_failed_total'), ONE]] },
        {
          title: 'Memory of uploads',
          unit: 'bytes',
          queries: [
            [at('refit:upload_staging_bytes'), `in use ${ONE}`],
            [at('refit:upload_staging_kept_bytes'), `kept ${ONE}`]
          ]
        },
        {
          title: 'Memory of trainers kept open',
          unit: 'bytes',
          queries: [[at('refit:kept_tensor_bytes'), ONE]]
        },
        {
          title: 'Open files of shared memory',
          help: 'A line that rises is a leak.',
          queries: [[`${at('refit:tensor_files_opened_total')} - ${at('refit:tensor_files_closed_total')}`, ONE]]
        },
        {
          title: 'Mapped segments of GPUs',
          help: 'A line that rises is a leak, unless trainers keep their memory open.',
          queries: [[`${at('refit:cuda_segments_opened_total')} - ${at('refit:cuda_segments_closed_total')}`, ONE]]
        }
      ]
    },
    {
      title: "Truth meter: a trainer's logprobs against the engine's (POST /truth)",
      panels: [
        {
          title: 'Difference of logprobs',
          unit: 'none',
          help: 'Of the newest weight version that was measured.',
          queries: [
            [at('refit:truth_difference_mean'), `mean ${ONE}`],
            [at('refit:truth_difference_p99'), `p99 ${ONE}`],
            [at('refit:truth_difference_max'), `max ${ONE}`]
          ]
        },
        {
          title: 'KL, and part of the tokens that is clipped',
          unit: 'none',
          queries: [[at('refit:truth_kl'), `KL ${ONE}`], [at('refit:truth_clipped_ratio'), `clipped ${ONE}`]]
        },
        {
          title: 'Compared samples per second, and warnings',
          help: '--truth-warn has the limit of warnings.',
          queries: [
            [perSecond('refit:truth_samples_total'), `samples ${ONE}`],
            [perSecond('refit:truth_warnings_total'), `warnings ${ONE}`]
          ]
        }
      ]
    },
    {
      title: 'Adapters (with --enable-lora)',
      panels: [
        { title: 'Loaded', queries: [[at('refit:adapters_loaded'), ONE]] },
        {
          title: 'Slots in use',
          queries: [[at('refit:adapter_slots_used'), ONE], [at('refit:adapter_slots'), `of ${ONE}`]]
        },
        {
          title: 'Time of loads',
          unit: 's',
          queries: [[percentile(0.99, 'refit:adapter_load_seconds', ',phase="total"'), `p99 ${ONE}`]]
        },
        {
          title: 'Loads, by outcome',
          help: 'In the last five minutes.',
          queries: [[
            `sum by (instance, outcome) (increase(${at('refit:adapter_loads_total')}[5m]))`,
            per('outcome')
          ]]
        },
        { title: 'Requests of each adapter', queries: [[at('refit:adapter_requests'), per('adapter')]] },
        { title: 'Version of each adapter', unit: 'none', queries: [[at('refit:adapter_version'), per('adapter')]] }
      ]
    }
  ]
}

const gateway: Board = {
  uid: 'refit-gateway',
  title: 'refit: gateway',
  description: 'The engines behind refit gateways.',
  instances: 'refit:gateway_workers',
  rows: [
    {
      title: 'Engines',
      panels: [
        { title: 'Engines, by state', queries: [[at('refit:gateway_workers'), per('state')]] },
        {
          title: 'Version of each engine',
          unit: 'none',
          queries: [[at('refit:gateway_worker_weight_version'), '{{worker}}']]
        },
        { title: 'In flight', queries: [[at('refit:gateway_requests_in_flight'), '{{worker}}']] }
      ]
    },
    {
      title: 'Requests',
      panels: [
        {
          title: 'Requests, by status',
          unit: 'reqps',
          queries: [[
            `sum by (instance, status) (rate(${at('refit:gateway_requests_total')}[$__rate_interval]))`,
            per('status')
          ]]
        },
        { title: 'Sent to another engine', unit: 'reqps', queries: [[perSecond('refit:gateway_retries_total'), ONE]] },
        { title: 'Paused', queries: [[at('refit:gateway_paused'), ONE]] },
        {
          title: 'Refused by the gateway, by code',
          help: 'In the last five minutes. Requests that an engine refused are among those by status.',
          queries: [[refusals('refit:gateway_requests_refused_total'), per('code')]]
        }
      ]
    },
    {
      title: 'Updates',
      panels: [
        {
          title: 'Updates, by how many engines took them',
          help: 'In the last five minutes.',
          queries: [[
            `sum by (instance, outcome) (increase(${at('refit:gateway_weight_updates_total')}[5m]))`,
            per('outcome')
          ]]
        },
        {
          title: 'Time of calls to all engines',
          unit: 's',
          queries: [[percentile(0.99, 'refit:gateway_fan_out_seconds'), `p99 ${ONE}`]]
        },
        {
          title: 'Failed replies to such calls',
          queries: [[
            `sum by (worker) (increase(${at('refit:gateway_fan_out_failures_total')}[5m]))`,
            '{{worker}}'
          ]]
        },
        {
          title: 'Loads of the current weights',
          queries: [[
            `sum by (instance, from, outcome) (increase(${at('refit:gateway_fills_total')}[5m]))`,
            '{{from}} {{outcome}}'
          ]]
        },
        {
          title: 'Time of such loads',
          unit: 's',
          queries: [[percentile(0.99, 'refit:gateway_fill_seconds'), `p99 ${ONE}`]]
        },
        { title: 'Version of the gateway', unit: 'none', queries: [[at('refit:gateway_weight_version'), ONE]] }
      ]
    }
  ]
}

/** By the name of the file. */
export const BOARDS: Readonly<Record<string, Board>> = { engine, updates, gateway }
