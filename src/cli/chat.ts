import { ChatSession } from '../chat/chat-session.ts'
import { ChatTerminal } from '../chat/terminal.ts'
import type { Terminal } from '../chat/terminal.ts'
import { ServerConnection } from '../client/server-connection.ts'
import { errorMessage, RefitError } from '../errors.ts'
import { parseCommand, readKey, readNumber, readUrl, refuse } from './command-url.ts'

export const CHAT_HELP = `Usage: refit chat URL [options]

Chats with a model in this terminal: of refit, or of any server with OpenAI's /v1/chat/completions. Shows the answer as
it comes and, if the server names it, the version of the weights that made it. Ctrl-C stops an answer, Ctrl-D ends;
/help lists the commands. Lines from a pipe are sent one after the other.

  --model NAME         (default: the first one of /v1/models)
  --system TEXT        the system prompt
  --temperature T      (default: the server's)
  --max-tokens N       of an answer (default: the server's)
  --api-key KEY        better in the variable REFIT_API_KEY

The exit code is 2 if the server cannot be reached.
`

const OPTIONS = {
  model: { type: 'string' },
  system: { type: 'string' },
  temperature: { type: 'string' },
  'max-tokens': { type: 'string' },
  'api-key': { type: 'string' }
} as const

const UNREACHABLE_EXIT = 2

/** `refit chat`. */
export async function chat (
  args: readonly string[],
  terminal: Terminal = { input: process.stdin, output: process.stdout }
): Promise<void> {
  const { values, positionals } = parseCommand('chat', args, OPTIONS)
  const url = readUrl('chat', positionals)
  const temperature = readNumber('chat', '--temperature', values.temperature, { least: 0, most: 100 })
  const limits = { least: 1, most: 1_000_000_000, integer: true }
  const maxTokens = readNumber('chat', '--max-tokens', values['max-tokens'], limits)
  const connection = new ServerConnection(url, { apiKey: readKey(values['api-key']) })
  try {
    const session = new ChatSession(connection, { model: values.model ?? '', temperature, maxTokens })
    const models = await readModels(session, url)
    if (models === null) return
    if (values.model === undefined) {
      if (models.length === 0) throw refuse('chat', `${url} lists no model at /v1/models: name one with --model`)
      session.settings.model = models[0]!
    }
    if (values.system !== undefined) session.setSystem(values.system)
    await new ChatTerminal(session, terminal).run()
  } finally {
    await connection.close()
  }
}

async function readModels (session: ChatSession, url: string): Promise<string[] | null> {
  try {
    return await session.models()
  } catch (error) {
    const message = errorMessage(error)
    process.stderr.write(`refit: ${error instanceof RefitError ? message : `${url} cannot be reached: ${message}`}\n`)
    process.exitCode = UNREACHABLE_EXIT
    return null
  }
}
