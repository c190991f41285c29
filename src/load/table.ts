import type { Distribution } from './distribution.ts'
import type { ServerFacts } from './detect.ts'
import type { LoadSummary } from './summary.ts'

/** A processor share from which the client may be what limits the figures. */
const BUSY = 0.8
const COLUMNS = ['mean', 'p50', 'p90', 'p99', 'p99.9', 'max'] as const

/** The result as text for a terminal. */
export function loadTable (server: ServerFacts, summary: LoadSummary): string {
  return [
    headLines(server, summary),
    countLines(summary),
    latencyLines(summary),
    errorLines(summary),
    warnings(summary)
  ]
    .filter(lines => lines.length > 0)
    .map(lines => lines.join('\n'))
    .join('\n\n') + '\n'
}

function headLines ({ kind, version }: ServerFacts, { settings }: LoadSummary): string[] {
  const { arrivals } = settings
  const how = 'rate' in arrivals
    ? `open loop, Poisson at ${arrivals.rate} requests/s`
    : `closed loop, ${arrivals.concurrency} requests at a time`
  return [
    `${kind}${version === null ? '' : ` ${version}`}, API ${settings.api}, model ${settings.model}`,
    `${how}, prompts ${lengthText(settings.prompt)}, outputs ${lengthText(settings.output)}, ` +
    `${settings.samples} sample${settings.samples === 1 ? '' : 's'} each, warm-up ${settings.warmup}, ` +
    `seed ${settings.seed}`
  ]
}

function lengthText (lengths: LoadSummary['settings']['prompt']): string {
  switch (lengths.kind) {
    case 'fixed':
      return String(lengths.tokens)
    case 'uniform':
      return `uniform ${lengths.least}-${lengths.most}`
    case 'exponential':
      return `exponential ${lengths.mean}, at most ${lengths.most}`
  }
}

function countLines (summary: LoadSummary): string[] {
  const { requests, tokens, throughput, in_flight: inFlight, weight_versions: versions } = summary
  const labels = Object.entries(versions)
  return [
    `requests         ${requests.succeeded} of ${requests.sent} in ${number(summary.duration_s)} s, ` +
    `${number(throughput.requests_per_s)}/s, in flight ${number(inFlight.mean)} on average, ${inFlight.max} at most`,
    `output tokens    ${tokens.output}, ${number(throughput.output_tokens_per_s)}/s`,
    `prompt tokens    ${tokens.prompt}, of which ${tokens.cached} were cached`,
    ...labels.length === 0
      ? []
      : [
        `weight versions  ${labels.slice(0, 8).map(([label, count]) => `${label}: ${count}`).join(', ')}${
          labels.length > 8
            ? `, and ${labels.length - 8} more`
            : ''
        }`
      ]
  ]
}

function latencyLines (summary: LoadSummary): string[] {
  const rows: [string, Distribution][] = [
    ['time to first token', summary.time_to_first_token_ms],
    ['inter-token latency', summary.inter_token_ms],
    ['gap between events', summary.gap_ms],
    ['time per output token', summary.time_per_output_token_ms],
    ['whole request', summary.request_ms]
  ]
  const cells = ({ mean, p50, p90, p99, p999, max }: Distribution): string =>
    [mean, p50, p90, p99, p999, max].map(value => (value === null ? '-' : number(value)).padStart(10)).join('')
  return [
    'milliseconds'.padEnd(22) + COLUMNS.map(name => name.padStart(10)).join(''),
    ...rows.map(([name, values]) => name.padEnd(22) + cells(values))
  ]
}

function errorLines ({ errors }: LoadSummary): string[] {
  return errors.map(({ kind, count, example }) => `error  ${String(count).padStart(6)} x ${kind}: ${example}`)
}

function warnings ({ client, settings, tokens, requests }: LoadSummary): string[] {
  const { p99 } = client.late_ms
  const limited = client.cpu > BUSY
    ? [`warning: this program used ${Math.round(client.cpu * 100)} % of a core, so it may be what limits the figures`]
    : []
  const late = 'rate' in settings.arrivals && p99 !== null && p99 > 10
    ? [`warning: one request in a hundred was sent ${number(p99)} ms after it was due, or later`]
    : []
  const fixed = settings.output.kind === 'fixed' ? settings.output.tokens * settings.samples * requests.succeeded : 0
  const short = tokens.output < fixed
    ? [`note: outputs ended early, after ${tokens.output} of ${fixed} tokens (--ignore-eos)`]
    : []
  return [...limited, ...late, ...short]
}

/** Three digits that matter, and all digits before the point. */
export function number (value: number): string {
  if (Math.abs(value) >= 100) return value.toFixed(0)
  return Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2)
}
