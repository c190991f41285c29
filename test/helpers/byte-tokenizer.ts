import type {
  ChatMessage,
  ChatTemplateOptions,
  DecodeOptions,
  Detokenizer,
  DetokenizerOptions,
  Tokenizer
} from '../../src/text/tokenizer.ts'

/** A tokenizer over bytes: id = byte. Two special tokens: 256 begins a text (never added), 2 ends it. */
export class ByteTokenizer implements Tokenizer {
  readonly vocabSize = 257
  readonly specialIds: ReadonlySet<number> = new Set([2, 256])
  readonly bosTokenId = 256
  readonly eosTokenId = 2
  readonly hasChatTemplate = true

  encode (text: string): number[] {
    return [...Buffer.from(text)]
  }

  decode (ids: ArrayLike<number>, { skipSpecialTokens = false }: DecodeOptions = {}): string {
    return Buffer.from(this.#bytes(ids, skipSpecialTokens)).toString()
  }

  idToText (id: number): string {
    return id === 256 ? '<bos>' : Buffer.of(id).toString()
  }

  applyChatTemplate (
    messages: readonly ChatMessage[],
    { addGenerationPrompt = true, kwargs = {} }: ChatTemplateOptions = {}
  ): string {
    return messages.map(({ role, content }) => `${role}:${String(content)}\n`).join('') +
      (kwargs['shout'] === true ? '!' : '') + (addGenerationPrompt ? 'assistant:' : '')
  }

  detokenizer ({ skipSpecialTokens = false }: DetokenizerOptions = {}): Detokenizer {
    let rest: number[] = []
    return {
      push: ids => {
        rest.push(...this.#bytes(ids, skipSpecialTokens))
        const text = new TextDecoder().decode(Uint8Array.from(rest), { stream: true })
        rest = rest.slice(Buffer.byteLength(text))
        return text
      },
      flush: () => {
        const text = Buffer.from(rest).toString()
        rest = []
        return text
      }
    }
  }

  #bytes (ids: ArrayLike<number>, skip: boolean): number[] {
    return Array.from(ids).flatMap(id =>
      skip && this.specialIds.has(id) ? [] : id === 256 ? [...Buffer.from('<bos>')] : id < 256 ? [id] : []
    )
  }
}

/** Keeps the calls of the chat template. */
export class TemplateSpy extends ByteTokenizer {
  readonly seen: { messages: readonly ChatMessage[], options: ChatTemplateOptions }[] = []

  override applyChatTemplate (messages: readonly ChatMessage[], options: ChatTemplateOptions = {}): string {
    this.seen.push({ messages, options })
    return super.applyChatTemplate(messages, options)
  }
}
