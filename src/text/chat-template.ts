import { Template } from '@huggingface/jinja'
import { RefitError } from '../errors.ts'
import { normalizeMessages } from './chat-messages.ts'
import type { ChatMessage, ChatTemplateOptions } from './tokenizer.ts'

// Marks the end of a last message that the model continues, so that the template's text after it can be cut off. Its
// last space shows whether the template trims.
const OPEN_END = 'REFIT_OPEN_END_OF_MESSAGE '
// A template that loops over a message's content takes it in parts.
const LOOPS_OVER_CONTENT = /\bin\s+\w+(\.content|\[\s*['"]content['"]\s*\])/
// Variables that are set here or by the template language.
const RESERVED = [
  'messages',
  'add_generation_prompt',
  'raise_exception',
  'strftime_now',
  'range',
  'true',
  'false',
  'none',
  'True',
  'False',
  'None'
]

/** The chat templates of one model, by name. Each is compiled at its first use. */
export class ChatTemplate {
  readonly #sources: Map<string, string>
  readonly #tokens: Map<string, string>
  readonly #dir: string
  readonly #compiled = new Map<string, Template>()

  /** `tokens`: bos_token, eos_token and the like, which templates may use. */
  constructor (sources: Map<string, string>, tokens: Map<string, string>, dir: string) {
    this.#sources = sources
    this.#tokens = tokens
    this.#dir = dir
  }

  get exists (): boolean {
    return this.#sources.size > 0
  }

  /** Throws INVALID_REQUEST if the template refuses the messages. */
  render (messages: readonly ChatMessage[], options: ChatTemplateOptions): string {
    const name = this.#choose(options)
    const source = this.#sources.get(name)!
    const chat = normalizeMessages(messages, LOOPS_OVER_CONTENT.test(source))
    const open = options.continueFinalMessage === true
    if (open) openLast(chat)
    const taken = RESERVED.find(key => Object.hasOwn(options.kwargs ?? {}, key))
    if (taken !== undefined) {
      throw new RefitError('INVALID_REQUEST', `chat_template_kwargs may not set ${taken}`, {
        param: 'chat_template_kwargs'
      })
    }
    const text = this.#run(name, {
      ...Object.fromEntries(this.#tokens),
      tools: options.tools ?? null,
      documents: null,
      ...options.kwargs,
      messages: chat,
      add_generation_prompt: !open && (options.addGenerationPrompt ?? true)
    })
    return open ? cutOpen(text) : text
  }

  #choose ({ name, tools }: ChatTemplateOptions): string {
    const names = [...this.#sources.keys()]
    const wanted = name ?? (tools != null && tools.length > 0 && this.#sources.has('tool_use') ? 'tool_use' : 'default')
    if (this.#sources.has(wanted)) return wanted
    const known = names.length === 0
      ? `the model at ${this.#dir} has no chat template; send a prompt to /v1/completions or /generate instead`
      : `no chat template is named ${JSON.stringify(wanted)}; the model has ${
        names.map(name => JSON.stringify(name)).join(', ')
      }`
    throw new RefitError('INVALID_REQUEST', known, { param: 'messages' })
  }

  #run (name: string, variables: Record<string, unknown>): string {
    let template = this.#compiled.get(name)
    if (template === undefined) {
      try {
        template = new Template(this.#sources.get(name)!)
      } catch (cause) {
        throw new RefitError('UNSUPPORTED', `the model's chat template cannot be parsed: ${(cause as Error).message}`, {
          param: 'messages',
          cause
        })
      }
      this.#compiled.set(name, template)
    }
    try {
      return template.render(variables)
    } catch (cause) {
      // The library throws plain errors both for raise_exception and for failures of its own.
      throw new RefitError(
        'INVALID_REQUEST',
        `the model's chat template does not take these messages: ${(cause as Error).message}`,
        { param: 'messages', cause }
      )
    }
  }
}

function openLast (chat: ChatMessage[]): void {
  const last = chat.at(-1)!
  if (Array.isArray(last.content)) {
    const parts = last.content as { text: string }[]
    last.content = parts.map((part, index) =>
      index === parts.length - 1 ? { ...part, text: part.text + OPEN_END } : part
    )
  } else {
    last.content = String(last.content) + OPEN_END
  }
}

function cutOpen (text: string): string {
  const end = text.lastIndexOf(OPEN_END.trimEnd())
  if (end < 0) {
    throw new RefitError(
      'INVALID_REQUEST',
      'continue_final_message: the chat template leaves the last message out or changes it',
      { param: 'messages' }
    )
  }
  return text.startsWith(OPEN_END, end) ? text.slice(0, end) : text.slice(0, end).trimEnd()
}
