import type { Distribution } from './distribution.ts'
import type { LoadPlan } from './run-load.ts'
import type { ErrorCount, LoadResult } from './series.ts'

/** The result of a load, as `--json` writes it. Times are milliseconds. */
export interface LoadSummary {
  settings: {
    api: string
    model: string
    arrivals: LoadPlan['arrivals']
    requests: number | null
    seconds: number | null
    warmup: number
    prompt: LoadPlan['prompt']
    output: LoadPlan['output']
    shared_prefix: number
    token_ids: LoadPlan['ids'] | null
    samples: number
    temperature: number
    ignore_eos: boolean
    seed: number
    timeout_s: number
  }
  duration_s: number
  requests: { sent: number, succeeded: number, failed: number }
  errors: ErrorCount[]
  tokens: { prompt: number, cached: number, output: number }
  throughput: { requests_per_s: number, output_tokens_per_s: number, total_tokens_per_s: number }
  time_to_first_token_ms: Distribution
  inter_token_ms: Distribution
  gap_ms: Distribution
  time_per_output_token_ms: Distribution
  request_ms: Distribution
  weight_versions: Record<string, number>
  in_flight: { mean: number, max: number }
  client: { cpu: number, late_ms: Distribution }
}

export function summarise (plan: LoadPlan, result: LoadResult): LoadSummary {
  const { measurements, promptTokens, cachedTokens, outputTokens, ms } = result
  const perSecond = (count: number): number => ms > 0 ? count / (ms / 1000) : 0
  return {
    settings: settingsOf(plan),
    duration_s: ms / 1000,
    requests: { sent: result.sent, succeeded: result.succeeded, failed: result.sent - result.succeeded },
    errors: result.errors,
    tokens: { prompt: promptTokens, cached: cachedTokens, output: outputTokens },
    throughput: {
      requests_per_s: perSecond(result.succeeded),
      output_tokens_per_s: perSecond(outputTokens),
      total_tokens_per_s: perSecond(promptTokens + outputTokens)
    },
    time_to_first_token_ms: measurements.firstToken.summary(),
    inter_token_ms: measurements.interToken.summary(),
    gap_ms: measurements.gap.summary(),
    time_per_output_token_ms: measurements.perToken.summary(),
    request_ms: measurements.request.summary(),
    weight_versions: result.versions,
    in_flight: result.inFlight,
    client: { cpu: result.clientCpu, late_ms: measurements.late.summary() }
  }
}

function settingsOf (plan: LoadPlan): LoadSummary['settings'] {
  return {
    api: plan.api.name,
    model: plan.model,
    arrivals: plan.arrivals,
    requests: plan.requests,
    seconds: plan.seconds,
    warmup: plan.warmup,
    prompt: plan.prompt,
    output: plan.output,
    shared_prefix: plan.sharedPrefix,
    token_ids: plan.api.takesIds ? plan.ids : null,
    samples: plan.samples,
    temperature: plan.temperature,
    ignore_eos: plan.ignoreEos,
    seed: plan.seed,
    timeout_s: plan.timeoutMs / 1000
  }
}
