import { createInterface } from 'node:readline'
import type { Interface } from 'node:readline'
import type { Readable, Writable } from 'node:stream'
import type { ChatEnd, ChatSession } from './chat-session.ts'

export interface Terminal {
  input: Readable & { isTTY?: boolean }
  output: Writable & { isTTY?: boolean }
}

const COMMANDS_HELP = `/reset           begin anew
/system TEXT     set the system prompt and begin anew; without TEXT: remove it
/model [NAME]    list the models, or choose one by its name or number
/quit            end, as Ctrl-D does
A line that ends with \\ goes on in the next one. Ctrl-C stops an answer.
`

/** The loop of `refit chat`: reads lines, and writes answers as they come. */
export class ChatTerminal {
  readonly #session: ChatSession
  readonly #output: Terminal['output']
  readonly #lines: Interface
  readonly #isTerminal: boolean
  /** Set while an answer comes. */
  #answer: AbortController | null = null
  #models: string[] = []
  #isClosed = false

  constructor (session: ChatSession, { input, output }: Terminal) {
    this.#session = session
    this.#output = output
    this.#isTerminal = input.isTTY === true && output.isTTY === true
    this.#lines = createInterface({ input, output, terminal: this.#isTerminal, historySize: 1000 })
    this.#lines.on('SIGINT', () => this.interrupt())
    this.#lines.on('close', () => {
      this.#isClosed = true
    })
  }

  /** Ctrl-C: ends the answer under way or, while none is, the chat. */
  interrupt (): void {
    if (this.#answer !== null) this.#answer.abort()
    else this.#lines.close()
  }

  /** Resolves at the end of the input. */
  async run (): Promise<void> {
    let message = ''
    this.#prompt('> ')
    for await (const line of this.#lines) {
      if (line.endsWith('\\')) {
        message += line.slice(0, -1) + '\n'
        this.#prompt('. ')
        continue
      }
      message += line
      if (message.startsWith('/')) {
        if (!await this.#command(message.trim())) break
      } else if (message.trim() !== '') await this.#ask(message)
      message = ''
      this.#prompt('> ')
    }
    this.#lines.close()
  }

  #prompt (text: string): void {
    if (!this.#isTerminal || this.#isClosed) return
    this.#lines.setPrompt(text)
    this.#lines.prompt()
  }

  /** Returns false if the chat ends. */
  async #command (line: string): Promise<boolean> {
    const [, name = '', rest = ''] = /^\/(\S*)\s*(.*)$/s.exec(line)!
    switch (name) {
      case 'quit':
      case 'exit':
        return false
      case 'reset':
        this.#session.reset()
        this.#note('the conversation begins anew')
        return true
      case 'system':
        this.#session.setSystem(rest === '' ? null : rest)
        this.#note(rest === '' ? 'no system prompt' : 'system prompt set; the conversation begins anew')
        return true
      case 'model':
        await this.#model(rest)
        return true
      default:
        if (name !== 'help') this.#note(`there is no command /${name}`)
        this.#output.write(COMMANDS_HELP)
        return true
    }
  }

  async #model (wanted: string): Promise<void> {
    try {
      this.#models = await this.#session.models()
    } catch (error) {
      return this.#note(`the models cannot be read: ${(error as Error).message}`)
    }
    const { settings } = this.#session
    if (wanted === '') {
      this.#output.write(
        this.#models.map((name, i) => `${name === settings.model ? '*' : ' '} ${i + 1} ${printable(name)}\n`).join('')
      )
      return
    }
    const name = this.#models.includes(wanted) ? wanted : this.#models[Number(wanted) - 1]
    if (name === undefined) return this.#note(`there is no model ${wanted}; /model lists them`)
    settings.model = name
    this.#note(`model ${name}`)
  }

  async #ask (message: string): Promise<void> {
    this.#answer = new AbortController()
    const began = performance.now()
    let kind: 'text' | 'reasoning' | null = null
    try {
      const answer = this.#session.ask(message, this.#answer.signal)
      let next = await answer.next()
      for (; next.done !== true; next = await answer.next()) {
        if (kind === 'reasoning' && next.value.kind === 'text') this.#output.write('\n\n')
        kind = next.value.kind
        const text = printable(next.value.text)
        this.#output.write(kind === 'reasoning' ? this.#dim(text) : text)
      }
      this.#answer = null
      this.#output.write('\n')
      this.#note(endText(next.value, performance.now() - began))
    } catch (error) {
      if (kind !== null) this.#output.write('\n')
      this.#note(`error: ${(error as Error).message}`)
    } finally {
      this.#answer = null
    }
  }

  #note (text: string): void {
    this.#output.write(this.#dim(`[${printable(text)}]`) + '\n')
  }

  #dim (text: string): string {
    return this.#isTerminal ? `\x1b[2m${text}\x1b[22m` : text
  }
}

function endText ({ weightVersion, finish, tokens }: ChatEnd, ms: number): string {
  return [
    ...weightVersion === null ? [] : [`weights ${weightVersion}`],
    ...tokens === null ? [] : [`${tokens} tokens`],
    `${(ms / 1000).toFixed(1)} s`,
    ...finish === null || finish === 'stop' ? [] : [finish]
  ]
    .join(', ')
}

/** Without ESC and its kind, a model's text cannot move the cursor or change the terminal's title. */
function printable (text: string): string {
  // eslint-disable-next-line no-control-regex
  return text.replace(/[\x00-\x08\x0b-\x1f\x7f-\x9f]/g, '')
}
