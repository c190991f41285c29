import { writeFileSync } from 'node:fs'
import { RefitError } from '../errors.ts'
import { API_NAMES } from '../load/api.ts'
import type { ApiName } from '../load/api.ts'
import { APIS } from '../load/apis.ts'
import { ServerConnection } from '../client/server-connection.ts'
import { detectServer } from '../load/detect.ts'
import type { ServerFacts } from '../load/detect.ts'
import { LENGTHS_HELP, parseLengths } from '../load/lengths.ts'
import { usualIds } from '../load/prompts.ts'
import type { IdRange } from '../load/prompts.ts'
import { runLoad } from '../load/run-load.ts'
import type { LoadPlan } from '../load/run-load.ts'
import { summarise } from '../load/summary.ts'
import { loadTable } from '../load/table.ts'
import { parseCommand, readKey, readNumber, readUrl, refuse } from './command-url.ts'

export const BENCH_HELP = `Usage: refit bench URL [options]

Loads a server and measures throughput and latency: refit, SGLang, vLLM, or any server with OpenAI's routes. Prints a
table; docs/bench.md explains the figures. The exit code is 0 if every request succeeded, 1 if one failed, 2 if the
server cannot be reached.

  --concurrency N        closed loop: N requests at a time (default 8)
  --rate R               open loop instead: R requests a second at Poisson times, however many are running
  --requests N           ends after N requests (default 100 unless --seconds is given)
  --seconds S            starts no request after S seconds
  --warmup N             requests before the measurement (default: --concurrency, or 8)
  --prompt LENGTHS       tokens of prompts: ${LENGTHS_HELP}
                         (default 512)
  --output LENGTHS       the same for outputs (default 128)
  --shared-prefix N      tokens at the beginning that all prompts have in common (default 0)
  --samples N            samples of each request, as for a group of rollouts (default 1)
  --temperature T        (default 1)
  --[no-]ignore-eos      outputs have their full length (default: with the APIs sglang and vllm, whose servers know it)
  --seed N               of lengths, prompts and arrivals (default 1)
  --api NAME             ${API_NAMES.join(', ')} (default: what the server is; chat for an unknown one).
                         sglang is /generate, vllm and openai are /v1/completions, chat is /v1/chat/completions
  --model NAME           (default: the first one of /v1/models)
  --token-ids LOW-HIGH   ids that prompts are made of (default: ordinary text in most vocabularies)
  --timeout S            the longest that a request may take (default 600)
  --api-key KEY          better in the variable REFIT_API_KEY
  --json FILE            writes the result as JSON
`

const OPTIONS = {
  concurrency: { type: 'string' },
  rate: { type: 'string' },
  requests: { type: 'string' },
  seconds: { type: 'string' },
  warmup: { type: 'string' },
  prompt: { type: 'string', default: '512' },
  output: { type: 'string', default: '128' },
  'shared-prefix': { type: 'string', default: '0' },
  samples: { type: 'string', default: '1' },
  temperature: { type: 'string', default: '1' },
  'ignore-eos': { type: 'boolean' },
  seed: { type: 'string', default: '1' },
  api: { type: 'string' },
  model: { type: 'string' },
  'token-ids': { type: 'string' },
  timeout: { type: 'string', default: '600' },
  'api-key': { type: 'string' },
  json: { type: 'string' }
} as const

type Flags = ReturnType<typeof parse>['values']
/** The parts of a plan that do not depend on the server. */
type Wanted = Omit<LoadPlan, 'connection' | 'api' | 'model' | 'deltas' | 'ids' | 'ignoreEos'>

const UNREACHABLE_EXIT = 2
const NO_SERVER: ReadonlySet<string> = new Set(['ENGINE_FAILED', 'UNAUTHORIZED'])
const MOST = 1_000_000_000

/** `refit bench`. */
export async function bench (args: readonly string[]): Promise<void> {
  const { values, positionals } = parse(args)
  const url = readUrl('bench', positionals)
  const wanted = readPlan(values)
  const [api, ids] = [readApi(values.api), readIds(values['token-ids'])]
  const connection = new ServerConnection(url, { apiKey: readKey(values['api-key']) })
  const stop = new AbortController()
  // A second signal ends the process at once.
  const onSignal = (): void => stop.abort()
  for (const signal of ['SIGINT', 'SIGTERM'] as const) process.once(signal, onSignal)
  try {
    const server = await detectServer(connection, { url, api, model: values.model ?? null })
    const plan = planFor(server, wanted, { connection, ids, ignoreEos: values['ignore-eos'], signal: stop.signal })
    const result = await runLoad(plan)
    const summary = summarise(plan, result)
    process.stdout.write(loadTable(server, summary))
    if (values.json !== undefined) {
      const head = { url, date: new Date().toISOString(), server }
      writeFileSync(values.json, JSON.stringify({ ...head, ...summary }, null, 2) + '\n')
    }
    if (stop.signal.aborted) process.stderr.write('refit: stopped before the end; the figures are those until then\n')
    if (stop.signal.aborted || result.errors.length > 0) process.exitCode = 1
  } catch (error) {
    if (!(error instanceof RefitError) || !NO_SERVER.has(error.code)) throw error
    process.stderr.write(`refit: ${error.message}\n`)
    process.exitCode = UNREACHABLE_EXIT
  } finally {
    for (const signal of ['SIGINT', 'SIGTERM'] as const) process.removeListener(signal, onSignal)
    await connection.close()
  }
}

function parse (args: readonly string[]) {
  return parseCommand('bench', args, OPTIONS)
}

function planFor (
  server: ServerFacts,
  wanted: Wanted,
  { connection, ids, ignoreEos, signal }: {
    connection: ServerConnection
    ids: IdRange | null
    ignoreEos: boolean | undefined
    signal: AbortSignal
  }
): LoadPlan {
  const api = APIS[server.api]
  return {
    ...wanted,
    connection,
    api,
    model: server.model,
    deltas: server.kind === 'refit' && server.api === 'sglang',
    ids: ids ?? usualIds(server.vocabulary),
    ignoreEos: ignoreEos ?? api.takesIds,
    signal
  }
}

function readPlan (values: Flags): Wanted {
  const count = (flag: keyof Flags, least = 1, most = MOST): number | null =>
    readNumber('bench', `--${flag}`, values[flag] as string | undefined, { least, most, integer: true })
  if (values.rate !== undefined && values.concurrency !== undefined) {
    throw refuse('bench', 'takes --concurrency (closed loop) or --rate (open loop), not both')
  }
  const rate = readNumber('bench', '--rate', values.rate, { least: 0.001, most: 100_000 })
  const concurrency = count('concurrency', 1, 65_536) ?? 8
  const seconds = readNumber('bench', '--seconds', values.seconds, { least: 0.1, most: 604_800 })
  return {
    arrivals: rate === null ? { concurrency } : { rate },
    requests: count('requests') ?? (seconds === null ? 100 : null),
    seconds,
    warmup: count('warmup', 0) ?? concurrency,
    prompt: parseLengths(values.prompt, '--prompt'),
    output: parseLengths(values.output, '--output'),
    sharedPrefix: count('shared-prefix', 0)!,
    samples: count('samples', 1, 4096)!,
    temperature: readNumber('bench', '--temperature', values.temperature, { least: 0, most: 100 })!,
    seed: count('seed', 0, 2 ** 32 - 1)!,
    timeoutMs: readNumber('bench', '--timeout', values.timeout, { least: 0.1, most: 86_400 })! * 1000
  }
}

function readApi (text: string | undefined): ApiName | null {
  if (text === undefined) return null
  if ((API_NAMES as readonly string[]).includes(text)) return text as ApiName
  throw refuse('bench', `--api: expected one of ${API_NAMES.join(', ')}, got ${JSON.stringify(text)}`)
}

function readIds (text: string | undefined): IdRange | null {
  if (text === undefined) return null
  const [, low, high] = /^(\d{1,9})-(\d{1,9})$/.exec(text) ?? []
  if (low !== undefined && Number(low) <= Number(high)) return { least: Number(low), most: Number(high) }
  throw refuse('bench', `--token-ids: expected two ids such as 1000-9999, got ${JSON.stringify(text)}`)
}
