import { Tokenizer as Library } from '@huggingface/tokenizers'
import { RefitError } from '../errors.ts'
import { byteForm } from './byte-form.ts'
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
import { WindowDetokenizer } from './window-detokenizer.ts'

/** tokenizer.json read by Hugging Face's JavaScript library. Decoding is our own if the decoder has a byte form. */
export class HuggingFaceTokenizer implements Tokenizer {
  readonly vocabSize: number
  readonly specialIds: ReadonlySet<number>
  readonly bosTokenId: number | null
  readonly eosTokenId: number | null
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
  }

  get hasChatTemplate (): boolean {
    return this.#template.exists
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
    if (this.#table === null) return this.#decodeByLibrary(ids, options.skipSpecialTokens ?? false)
    const detokenizer = this.detokenizer(options)
    return detokenizer.push(ids) + detokenizer.flush()
  }

  idToText (id: number): string {
    return this.#table === null
      ? this.#decodeByLibrary([id], false)
      : this.#table.piece(id)?.bytes.toString('utf8') ?? ''
  }

  applyChatTemplate (messages: readonly ChatMessage[], options: ChatTemplateOptions = {}): string {
    return this.#template.render(messages, options)
  }

  detokenizer ({ skipSpecialTokens = false, context = [] }: DetokenizerOptions = {}): Detokenizer {
    const skipped = skipSpecialTokens ? this.specialIds : null
    if (this.#table !== null) return new ByteDetokenizer(this.#table, skipped, context.length > 0)
    return new WindowDetokenizer(
      ids => this.#decodeByLibrary(ids, skipSpecialTokens),
      id => this.#speaks(id, skipSpecialTokens),
      context
    )
  }

  #decodeByLibrary (ids: ArrayLike<number>, skipSpecialTokens: boolean): string {
    const known = Array.from(ids).filter(id => this.#speaks(id, skipSpecialTokens))
    // Cleaning up would remove real spaces from generated text; transformers 5 does not do it either.
    return known.length === 0 ? '' : this.#library.decode(known, { clean_up_tokenization_spaces: false })
  }

  #speaks (id: number, skipSpecialTokens: boolean): boolean {
    return this.#library.id_to_token(id) !== undefined && !(skipSpecialTokens && this.specialIds.has(id))
  }
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
