import { parseArgs } from 'node:util'
import { createEngine } from '../app/create-engine.ts'
import { buildServer } from '../app/server.ts'
import { ClientError } from '../client/client-error.ts'
import { RefitClient } from '../client/client.ts'
import { resolveModel } from '../config/resolve-model.ts'
import { errorMessage, RefitError } from '../errors.ts'
import type { HeldDType } from '../native/dtypes.ts'
import { compareReceipts, TOLERANCE } from '../replay/compare-receipts.ts'
import { generateAgain } from '../replay/generate-again.ts'
import { readReceipt } from '../replay/read-receipt.ts'

export const REPLAY_HELP = `Usage: refit replay RECEIPT --model FOLDER
       refit replay RECEIPT --url URL [--api-key KEY]

Generates a sample again from its receipt (GET /samples/ID) and compares: weights by their digest, tokens one by one,
and logprobs, bit for bit where the device promises the same bits (the CPU, and GPUs with --deterministic; with the same
program, instruction set, GPUs and dtype, and without --deterministic as many ranks).

The exit code is 0 if all is equal, 1 if something differs, 2 if the sample cannot be repeated: the receipt is none or
was changed, the server cannot be reached, or several weight versions made the tokens.

  --model FOLDER       load this checkpoint, in the receipt's dtype and with its ranks
  --url URL            use the weights of a running server
  --api-key KEY        its key (default: the variable REFIT_API_KEY)
  --tolerance NATS     largest difference of logprobs where no bits are promised (default ${TOLERANCE})
`

const OPTIONS = {
  model: { type: 'string' },
  url: { type: 'string' },
  'api-key': { type: 'string' },
  tolerance: { type: 'string', default: String(TOLERANCE) }
} as const

const UNREPEATABLE_EXIT = 2

/** `refit replay`. */
export async function replay (args: readonly string[]): Promise<void> {
  const { values, positionals } = parse(args)
  const [path, ...more] = positionals
  if (path === undefined || more.length > 0) throw bad(`expected one receipt, got ${positionals.length}`)
  if ((values.model === undefined) === (values.url === undefined)) throw bad('needs either --model or --url')
  const tolerance = Number(values.tolerance)
  if (!(tolerance >= 0)) throw bad(`--tolerance: expected a number from 0, got ${JSON.stringify(values.tolerance)}`)
  const receipt = readReceipt(path)
  const key = values['api-key'] ?? process.env.REFIT_API_KEY
  const server = values.url === undefined
    ? await serveAgain(values.model!, receipt.device)
    : { url: readUrl(values.url), close: async () => {} }
  const client = new RefitClient(server.url, key === undefined || values.url === undefined ? {} : { apiKey: key })
  try {
    const { equal, lines } = compareReceipts(receipt, await generateAgain(client, receipt), tolerance)
    process.stdout.write(lines.map(line => line + '\n').join(''))
    if (!equal) process.exitCode = 1
  } catch (error) {
    if (!(error instanceof ClientError) && !(error instanceof RefitError && error.code === 'UNSUPPORTED')) throw error
    process.stderr.write(`refit: replay: ${errorMessage(error)}\n`)
    process.exitCode = UNREPEATABLE_EXIT
  } finally {
    await client.close()
    await server.close()
  }
}

/** A server of the checkpoint, for this process alone. */
async function serveAgain (
  model: string,
  { kind, dtype, ranks, exact, any_ranks: anyRanks = kind !== 'cpu' && exact }: ReturnType<typeof readReceipt>['device']
): Promise<{ url: string, close: () => Promise<void> }> {
  const engine = await createEngine(resolveModel(model, 'main', process.env).path, {
    device: kind as 'cpu' | 'cuda',
    dtype: dtype as HeldDType,
    tp: ranks,
    // On one rank of a CPU the option changes nothing.
    deterministic: anyRanks
  })
  const app = await buildServer({ engine, port: 0 })
  return {
    url: app.listeningOrigin,
    close: async () => {
      await app.close()
      await engine.close()
    }
  }
}

function parse (args: readonly string[]) {
  try {
    return parseArgs({ args: [...args], options: OPTIONS, allowPositionals: true })
  } catch (error) {
    throw bad(errorMessage(error))
  }
}

function readUrl (url: string): string {
  if (URL.canParse(url) && /^https?:$/.test(new URL(url).protocol)) return url
  throw bad(`expected a URL such as http://127.0.0.1:30000, got ${JSON.stringify(url)}`)
}

function bad (message: string): RefitError {
  return new RefitError('CONFIG', `replay: ${message}`)
}
