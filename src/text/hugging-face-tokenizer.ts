import { Tokenizer as Library } from '@huggingface/tokenizers'
import { RefitError } from '../errors.ts'
import { BackgroundText } from './background.ts'
import { byteForm } from './byte-form.ts'
import type { ByteForm } from './byte-form.ts'
import { ChatTemplate } from './chat-template.ts'
import { ByteDetokenizer, PieceTable } from './detokenizer.ts'
import { namedTokens } from './special-tokens.ts'
import type {
  ChatMessage,
  ChatTemplateOptions,
  DecodeOptions,
  Detokenizer,
  DetokenizerOptions,
  Tokenizer
} from './tokenizer.ts'
import type { TokenizerFiles } from './tokenizer-files.ts'
import { makeVocabulary } from './vocabulary.ts'
import type { Vocabulary } from './vocabulary.ts'
import { WindowDetokenizer } from './window-detokenizer.ts'

const NONE: ReadonlySet<number> = new Set()

/** tokenizer.json read by Hugging Face's JavaScript library. Decoding is our own if the decoder has a byte form. */
export class HuggingFaceTokenizer implements Tokenizer {
  readonly vocabSize: number
  readonly specialIds: ReadonlySet<number>
  readonly bosTokenId: number | null
  readonly eosTokenId: number | null
  readonly longestToken: number
  readonly background: BackgroundText
  readonly #library: Library
  readonly #table: PieceTable | null
  readonly #template: ChatTemplate
  /** Ids put around a text if tokenizer_config.json requires it; null leaves it to tokenizer.json. */
  readonly #around: { before: number[], after: number[] } | null

  constructor (files: TokenizerFiles) {
    const { config } = files
    const library = openLibrary(files)
    this.#library = library
    this.vocabSize = library.model!.vocab.length
    const added = library.get_added_tokens_decoder()
    const named = namedTokens(config)
    const id = (name: string) => library.token_to_id(named.get(name) ?? '') ?? null
    this.bosTokenId = id('bos_token')
    this.eosTokenId = id('eos_token')
    const special = [...added].filter(([, token]) => token.special).map(([id]) => id)
    this.specialIds = new Set([...special, ...[...named.values()].flatMap(token => library.token_to_id(token) ?? [])])
    const form = byteForm(files.tokenizer['decoder'])
    this.#table = form === null ? null : new PieceTable(form, id => library.id_to_token(id), id => added.has(id))
    this.#template = new ChatTemplate(files.templates, named, files.dir)
    this.#around = around(config, this.bosTokenId, this.eosTokenId)
    this.longestToken = longestToken(library, form, id => added.has(id)) * shrinkage(files.tokenizer['normalizer'])
    this.background = new BackgroundText(files)
  }

  get hasChatTemplate (): boolean {
    return this.#template.exists
  }

  get vocabulary (): Vocabulary | undefined {
    const table = this.#table
    return table === null
      ? undefined
      : makeVocabulary(this.vocabSize, id => table.piece(id)?.bytes ?? null, this.specialIds)
  }

  encode (text: string, { addSpecialTokens = true } = {}): number[] {
    const around = addSpecialTokens ? this.#around : null
    const ids: (number | undefined)[] =
      this.#library.encode(text, { add_special_tokens: addSpecialTokens && around === null }).ids
    // A character outside the vocabulary has no id if there is no token for the unknown.
    const known = ids.filter(id => id !== undefined)
    return around === null ? known : [...around.before, ...known, ...around.after]
  }

  decode (ids: ArrayLike<number>, options: DecodeOptions = {}): string {
    if (this.#table === null) {
      return this.#decodeByLibrary(
        ids,
        options.skipSpecialTokens === true
          ? this.specialIds
          : NONE
      )
    }
    const detokenizer = this.detokenizer(options)
    return detokenizer.push(ids) + detokenizer.flush()
  }

  idToText (id: number): string {
    return this.#table === null
      ? this.#decodeByLibrary([id], NONE)
      : this.#table.piece(id)?.bytes.toString('utf8') ?? ''
  }

  applyChatTemplate (messages: readonly ChatMessage[], options: ChatTemplateOptions = {}): string {
    return this.#template.render(messages, options)
  }

  detokenizer ({ skipSpecialTokens = false, context = [], visible }: DetokenizerOptions = {}): Detokenizer {
    const skipped = skipSpecialTokens ? without(this.specialIds, visible) : NONE
    if (this.#table !== null) return new ByteDetokenizer(this.#table, skipped, context.length > 0)
    return new WindowDetokenizer(ids => this.#decodeByLibrary(ids, skipped), id => this.#speaks(id, skipped), context)
  }

  #decodeByLibrary (ids: ArrayLike<number>, skipped: ReadonlySet<number>): string {
    const known = Array.from(ids).filter(id => this.#speaks(id, skipped))
    // Cleaning up would remove real spaces from generated text; transformers 5 does not do it either.
    return known.length === 0 ? '' : this.#library.decode(known, { clean_up_tokenization_spaces: false })
  }

  #speaks (id: number, skipped: ReadonlySet<number>): boolean {
    return this.#library.id_to_token(id) !== undefined && !skipped.has(id)
  }
}

/** Most bytes of one token. */
function longestToken (library: Library, form: ByteForm | null, isAdded: (id: number) => boolean): number {
  let longest = 1
  for (const [id, token] of library.model!.vocab.entries()) {
    // UTF-8 takes at most three bytes for a UTF-16 unit, so most tokens need no encoding.
    if (token === undefined || token.length * 3 <= longest) continue
    longest = Math.max(longest, form?.bytesOf(token, isAdded(id)).length ?? Buffer.byteLength(token))
  }
  return longest
}

/** How many times shorter a normalizer makes a text at most: one byte of "a" for four of a mathematical letter. */
function shrinkage (normalizer: unknown): number {
  return normalizer == null ? 1 : 4
}

function without (ids: ReadonlySet<number>, left: ReadonlySet<number> = NONE): ReadonlySet<number> {
  return left.size === 0 ? ids : new Set([...ids].filter(id => !left.has(id)))
}

function openLibrary ({ dir, tokenizer, config }: TokenizerFiles): Library {
  try {
    return new Library(tokenizer, config)
  } catch (cause) {
    throw new RefitError(
      'MODEL_CONFIG',
      `${dir}/tokenizer.json cannot be used: ${
        (cause as Error).message
      }; --skip-tokenizer-init serves the model by token ids alone`,
      { cause }
    )
  }
}

/** As in transformers 5: either flag, once present, replaces the post-processor of tokenizer.json. */
function around (
  config: Record<string, unknown>,
  bos: number | null,
  eos: number | null
): { before: number[], after: number[] } | null {
  if (typeof config['add_bos_token'] !== 'boolean' && typeof config['add_eos_token'] !== 'boolean') return null
  return {
    before: config['add_bos_token'] === true && bos !== null ? [bos] : [],
    after: config['add_eos_token'] === true && eos !== null ? [eos] : []
  }
}
