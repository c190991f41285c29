import { HuggingFaceTokenizer } from './hugging-face-tokenizer.ts'
import { readTokenizerFiles } from './tokenizer-files.ts'

// Text laid over token ids. The engine itself never sees text, and generated ids are never tokenized again.

export interface DecodeOptions {
  /** Leave special tokens out of the text (default false). */
  skipSpecialTokens?: boolean
  /** Taken for callers' sake. Without effect, as with every tokenizer.json: only slow tokenizers put spaces there. */
  spacesBetweenSpecialTokens?: boolean
}

export interface DetokenizerOptions extends DecodeOptions {
  /** Ids before the first pushed one: the text goes on from theirs, so its first space stays. Only the last few are looked at. */
  context?: ArrayLike<number>
}

/** Turns one stream of ids into text as they come. Made per request; linear in the number of ids. */
export interface Detokenizer {
  /** The text that these ids complete; the bytes of an unfinished character wait for the next call. */
  push: (ids: ArrayLike<number>) => string
  /** What still waits, broken characters as U+FFFD. All pushes and this, joined, equal `decode` of all ids. */
  flush: () => string
}

/** A message as OpenAI's chat endpoint takes it; templates read whatever fields they know. */
export interface ChatMessage {
  role: string
  content?: unknown
  [field: string]: unknown
}

export interface ChatTemplateOptions {
  /** End with the opening of the assistant's turn (default true). */
  addGenerationPrompt?: boolean
  /** Leave the last message open, to be gone on with. */
  continueFinalMessage?: boolean
  /** Tool schemas; a template named `tool_use` is taken if there is one. */
  tools?: unknown[] | null
  /** More variables for the template (`chat_template_kwargs`). */
  kwargs?: Record<string, unknown>
  /** Name of the template, where the model has several. */
  name?: string
}

export interface Tokenizer {
  /** One more than the largest id that the tokenizer knows. The model's own vocabulary may be larger (padding). */
  readonly vocabSize: number
  readonly specialIds: ReadonlySet<number>
  readonly bosTokenId: number | null
  /** Of tokenizer_config.json; the model's stop ids are those of generation_config.json. */
  readonly eosTokenId: number | null
  readonly hasChatTemplate: boolean
  /** Special tokens written in the text become their ids. `addSpecialTokens` (default true) adds the bos that the model wants. */
  encode: (text: string, options?: { addSpecialTokens?: boolean }) => number[]
  /** Ids that the tokenizer does not know give no text. */
  decode: (ids: ArrayLike<number>, options?: DecodeOptions) => string
  /** Text of one token alone, special ones included, its space kept; parts of a character are U+FFFD. */
  idToText: (id: number) => string
  /** Prompt text of a conversation, to be encoded without special tokens. Throws INVALID_REQUEST where the template refuses. */
  applyChatTemplate: (messages: readonly ChatMessage[], options?: ChatTemplateOptions) => string
  detokenizer: (options?: DetokenizerOptions) => Detokenizer
}

/** The tokenizer of a model folder, or null where it has no tokenizer.json. Throws MODEL_CONFIG for broken files. */
export async function loadTokenizer (dir: string): Promise<Tokenizer | null> {
  const files = await readTokenizerFiles(dir)
  return files === null ? null : new HuggingFaceTokenizer(files)
}
