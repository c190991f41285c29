import { HuggingFaceTokenizer } from './hugging-face-tokenizer.ts'
import type { Vocabulary } from './vocabulary.ts'
import { readTokenizerFiles } from './tokenizer-files.ts'

// Conversion between text and token ids. The engine itself never sees text, and generated ids are never tokenized
// again.

export interface DecodeOptions {
  /** Leave special tokens out of the text (default false). */
  skipSpecialTokens?: boolean
  /** Accepted for compatibility. No effect, as with every tokenizer.json: only slow tokenizers add such spaces. */
  spacesBetweenSpecialTokens?: boolean
}

export interface DetokenizerOptions extends DecodeOptions {
  /** Ids before the first pushed one. The text continues theirs, so its first space stays. Only the last few matter. */
  context?: ArrayLike<number>
  /** Special tokens that stay in the text although others are left out. */
  visible?: ReadonlySet<number>
}

/** Converts one stream of ids to text as they arrive. Made per request; linear in the number of ids. */
export interface Detokenizer {
  /** The text that these ids complete. The bytes of an unfinished character wait for the next call. */
  push: (ids: ArrayLike<number>) => string
  /**
   * The text that still waits, with broken characters as U+FFFD. All pushes and this, joined, equal `decode` of all
   * ids.
   */
  flush: () => string
}

/** A message of OpenAI's chat endpoint. Templates read whatever fields they know. */
export interface ChatMessage {
  role: string
  content?: unknown
  [field: string]: unknown
}

export interface ChatTemplateOptions {
  /** Ends with the opening of the assistant's turn (default true). */
  addGenerationPrompt?: boolean
  /** Leaves the last message open for the model to continue. */
  continueFinalMessage?: boolean
  /** Tool schemas. A template named `tool_use` is used if there is one. */
  tools?: unknown[] | null
  /** More variables for the template (`chat_template_kwargs`). */
  kwargs?: Record<string, unknown>
  /** Name of the template, if the model has several. */
  name?: string
}

/** `encode` and `applyChatTemplate` of a tokenizer on another thread. */
export interface TextThread {
  encode: (text: string, options?: { addSpecialTokens?: boolean }) => Promise<ArrayLike<number>>
  applyChatTemplate: (messages: readonly ChatMessage[], options?: ChatTemplateOptions) => Promise<string>
}

export interface Tokenizer {
  /** One more than the largest id that the tokenizer knows. The model's own vocabulary may be larger (padding). */
  readonly vocabSize: number
  readonly specialIds: ReadonlySet<number>
  readonly bosTokenId: number | null
  /** From tokenizer_config.json; the model's stop ids are in generation_config.json. */
  readonly eosTokenId: number | null
  readonly hasChatTemplate: boolean
  /** Most bytes of text that one token can stand for; absent if there is no bound. */
  readonly longestToken?: number
  /** Does the work of long texts on a thread of its own; absent if the tokenizer has none. */
  readonly background?: TextThread
  /** The texts of all tokens as bytes; absent if the decoder has no such form. */
  readonly vocabulary?: Vocabulary
  /**
   * Special tokens in the text become their ids. `addSpecialTokens` (default true) adds the bos token that the model
   * expects.
   */
  encode: (text: string, options?: { addSpecialTokens?: boolean }) => number[]
  /** Unknown ids produce no text. */
  decode: (ids: ArrayLike<number>, options?: DecodeOptions) => string
  /** Text of one token, special ones included, with its space; parts of a character are U+FFFD. */
  idToText: (id: number) => string
  /**
   * Prompt text of a conversation, to be encoded without special tokens. Throws INVALID_REQUEST if the template refuses
   * the messages.
   */
  applyChatTemplate: (messages: readonly ChatMessage[], options?: ChatTemplateOptions) => string
  detokenizer: (options?: DetokenizerOptions) => Detokenizer
}

/** The tokenizer of a model folder, or null if it has no tokenizer.json. Throws MODEL_CONFIG for broken files. */
export async function loadTokenizer (dir: string): Promise<Tokenizer | null> {
  const files = await readTokenizerFiles(dir)
  return files === null ? null : new HuggingFaceTokenizer(files)
}
