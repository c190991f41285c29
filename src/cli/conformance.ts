import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { basename, join, resolve } from 'node:path'
import { checkServer } from '../conformance/check-server.ts'
import type { ServerKind } from '../conformance/servers/detect.ts'
import { PROMISES } from '../conformance/promises/index.ts'
import { TRANSPORTS } from '../conformance/setup.ts'
import { describeRow, listPromises, summarise } from '../conformance/table.ts'
import { RefitError } from '../errors.ts'
import type { TransportName } from '../conformance/transports/transport.ts'
import { parseCommand, readUrl, refuse } from './command-url.ts'

export const CONFORMANCE_HELP = `Usage: refit conformance URL --model FOLDER [options]

Checks what a server promises about weight updates: refit, SGLang, vLLM, or any server with their routes. It replaces
the weights many times, kills senders, lies about tensors, and at the end puts the weights of --model back. Nothing
else may use the server meanwhile. Prints one line for each promise: kept, broken, or not offered.

The exit code is 0 if no promise is broken, 1 if one is, 2 if the server cannot be reached.

  --model FOLDER        the checkpoint that the server serves: config.json and safetensors files
  --folder FOLDER       where checkpoints for the server are written; the server must be able to read it
                        (default: a temporary folder)
  --server-folder PATH  the same folder as the server sees it, if its path differs
  --dialect NAME        sglang or vllm (default: what the server has; SGLang's routes win)
  --transports LIST     of ${TRANSPORTS.join(', ')} (default: all)
  --address HOST        the address at which the server reaches this machine, for broadcasts (default 127.0.0.1)
  --api-key KEY, --admin-api-key KEY
  --patience SECONDS    the longest that any call may take (default 120)
  --only TEXT           only promises whose names contain it
  --json FILE           writes the table as JSON
  --list                prints all promises and ends
`

const OPTIONS = {
  model: { type: 'string' },
  folder: { type: 'string' },
  'server-folder': { type: 'string' },
  dialect: { type: 'string' },
  transports: { type: 'string' },
  address: { type: 'string', default: '127.0.0.1' },
  'api-key': { type: 'string' },
  'admin-api-key': { type: 'string' },
  patience: { type: 'string', default: '120' },
  only: { type: 'string', default: '' },
  json: { type: 'string' },
  list: { type: 'boolean', default: false }
} as const

const UNREACHABLE_EXIT = 2

/** `refit conformance`. */
export async function conformance (args: readonly string[]): Promise<void> {
  const { values, positionals } = parseCommand('conformance', args, OPTIONS)
  if (values.list) {
    process.stdout.write(listPromises(PROMISES))
    return
  }
  const url = readUrl('conformance', positionals)
  const folder = values.folder === undefined ? tmpdir() : resolve(values.folder)
  mkdirSync(folder, { recursive: true })
  const work = mkdtempSync(join(folder, 'refit-conformance-'))
  const serverRoot = values['server-folder'] ?? folder
  try {
    // The weights are put back after the promise that is being checked. A second signal ends the process at once.
    const stop = new AbortController()
    for (const signal of ['SIGINT', 'SIGTERM'] as const) process.once(signal, () => stop.abort())
    const rows = await checkServer(url, {
      signal: stop.signal,
      work: { path: work, serverPath: join(serverRoot, basename(work)), model: readModel(values.model) },
      address: values.address,
      apiKey: values['api-key'],
      adminKey: values['admin-api-key'],
      patienceMs: readPatience(values.patience) * 1000,
      dialect: readDialect(values.dialect),
      transports: readTransports(values.transports),
      only: values.only,
      onRow: row => process.stdout.write(describeRow(row) + '\n')
    })
    process.stdout.write(`\n${summarise(rows)}\n`)
    if (values.json !== undefined) writeFileSync(values.json, JSON.stringify({ url, rows }, null, 2) + '\n')
    const isBad = rows.some(({ verdict }) => verdict === 'broken' || verdict === 'not run')
    if (stop.signal.aborted) process.stderr.write('refit: stopped before the end; the weights were put back\n')
    if (isBad || stop.signal.aborted) process.exitCode = 1
  } catch (error) {
    if (!(error instanceof RefitError) || error.code !== 'ENGINE_FAILED') throw error
    process.stderr.write(`refit: ${error.message}\n`)
    process.exitCode = UNREACHABLE_EXIT
  } finally {
    rmSync(work, { recursive: true, force: true })
  }
}

function readModel (model: string | undefined): string {
  if (model === undefined) throw refuse('conformance', 'needs --model FOLDER, the checkpoint that the server serves')
  return resolve(model)
}

function readPatience (text: string): number {
  const seconds = Number(text)
  if (seconds > 0 && seconds <= 86_400) return seconds
  throw refuse('conformance', `--patience: expected seconds from 1 to 86400, got ${JSON.stringify(text)}`)
}

function readDialect (text: string | undefined): ServerKind | null {
  if (text === undefined) return null
  if (text === 'sglang' || text === 'vllm') return text
  throw refuse('conformance', `--dialect: expected sglang or vllm, got ${JSON.stringify(text)}`)
}

function readTransports (text: string | undefined): readonly TransportName[] {
  if (text === undefined) return TRANSPORTS
  const names = text.split(',').map(name => name.trim())
  const unknown = names.find(name => !(TRANSPORTS as readonly string[]).includes(name))
  if (unknown === undefined) return names as TransportName[]
  throw refuse('conformance', `--transports: expected some of ${TRANSPORTS.join(', ')}, got ${JSON.stringify(unknown)}`)
}
