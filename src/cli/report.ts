import { readFileSync, writeFileSync } from 'node:fs'
import { availableParallelism, cpus, freemem, release, totalmem, type } from 'node:os'
import { join } from 'node:path'
import { ServerConnection } from '../client/server-connection.ts'
import type { Option } from '../config/option.ts'
import { variableName } from '../config/option.ts'
import { OPTIONS } from '../config/schema.ts'
import { probeGpus } from '../engine/memory/probe-gpus.ts'
import { errorMessage } from '../errors.ts'
import { native } from '../native/load-addon.ts'
import { collect } from '../report/collect.ts'
import { scrub } from '../report/scrub.ts'
import { reportText } from '../report/text.ts'
import type { ReportDocument } from '../report/text.ts'
import { packageRoot } from '../root.ts'
import { parseCommand, readKey, readUrl } from './command-url.ts'

export const REPORT_HELP = `Usage: refit report [URL] [options]

Writes one file for a bug report: versions, devices, configuration, and of the server at URL its configuration, state,
metrics, last updates and last errors. It contains no keys, prompts or outputs; read it before you publish it all the
same, because it contains names of files, models and hosts.

  --output FILE        default: standard output; with the ending .json it is JSON, else text
  --json               JSON on standard output
  --api-key KEY        better in the variable REFIT_API_KEY
  --admin-api-key KEY  of a server with an admin key: for its configuration and last errors; better in the variable
                       REFIT_ADMIN_API_KEY

The exit code is 2 if the server cannot be reached; the rest of the report is written then, too.
`

const OPTIONS_OF_REPORT = {
  output: { type: 'string' },
  json: { type: 'boolean', default: false },
  'api-key': { type: 'string' },
  'admin-api-key': { type: 'string' }
} as const

const UNREACHABLE_EXIT = 2

interface Keys {
  api: string | undefined
  admin: string | undefined
}

/** `refit report`. */
export async function report (args: readonly string[]): Promise<void> {
  const { values, positionals } = parseCommand('report', args, OPTIONS_OF_REPORT)
  const url = positionals.length === 0 ? null : readUrl('report', positionals)
  const keys = {
    api: readKey(values['api-key']),
    admin: values['admin-api-key'] ?? (process.env['REFIT_ADMIN_API_KEY'] || undefined)
  }
  const document = {
    date: new Date().toISOString(),
    local: await describeMachine(),
    server: url === null ? null : await readServer(url, keys)
  }
  const clean = scrub(document, secretsOf(process.env, Object.values(keys))) as ReportDocument
  const isJson = values.json || values.output?.endsWith('.json') === true
  const text = isJson ? JSON.stringify(clean, null, 2) + '\n' : reportText(clean)
  if (values.output === undefined) process.stdout.write(text)
  else writeFileSync(values.output, text, { mode: 0o600 })
}

async function readServer (url: string, keys: Keys): Promise<ReportDocument['server']> {
  const normal = new ServerConnection(url, { apiKey: keys.api })
  const admin = new ServerConnection(url, {
    apiKey: keys.admin ?? keys.api,
    keyFrom: '--admin-api-key, or by --api-key on a server without an admin key'
  })
  try {
    const parts = await collect(normal, admin)
    if (parts.every(part => 'missing' in part)) {
      process.stderr.write(`refit: ${url} cannot be reached, or it requires another key: the report lacks it\n`)
      process.exitCode = UNREACHABLE_EXIT
    }
    return { url, parts }
  } finally {
    await Promise.all([normal.close(), admin.close()])
  }
}

async function describeMachine (): Promise<Record<string, unknown>> {
  const { version } = JSON.parse(readFileSync(join(packageRoot, 'package.json'), 'utf8')) as { version: string }
  return {
    refit: version,
    node: process.version,
    system: `${type()} ${release()} ${process.arch}`,
    processors: `${availableParallelism()} of ${cpus()[0]?.model.trim() ?? 'unknown'}`,
    memory: `${gigabytes(freemem())} of ${gigabytes(totalmem())} GB free`,
    native: attempt(() => ({ instruction_sets: native().isas() })),
    devices: await probeGpus(),
    variables: variables(process.env)
  }
}

/** refit's own variables; a secret is shown as set, and not more. */
function variables (env: NodeJS.ProcessEnv): Record<string, string> {
  const known = Object.entries<Option>(OPTIONS).map(([key, { secret }]) =>
    [variableName(key), secret === true] as const
  )
  return Object.fromEntries(known.flatMap(([name, isSecret]) => {
    const value = env[name]
    return value === undefined ? [] : [[name, isSecret ? '***' : value]]
  }))
}

/** Values that must not appear anywhere: keys of the command line and of the environment. */
function secretsOf (env: NodeJS.ProcessEnv, keys: readonly (string | undefined)[]): string[] {
  const names = Object.keys(env).filter(name => /KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL/.test(name))
  // A short value would also match parts of ordinary words.
  return [...keys, ...names.map(name => env[name])].flatMap(value =>
    value !== undefined && value.length >= 4 ? [value] : []
  )
}

function attempt (read: () => unknown): unknown {
  try {
    return read()
  } catch (error) {
    return errorMessage(error)
  }
}

function gigabytes (bytes: number): string {
  return (bytes / 1e9).toFixed(1)
}
