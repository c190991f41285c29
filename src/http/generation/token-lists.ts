import { Type } from 'typebox'
import type { EngineInfo, SamplingParams } from '../../contract/rollout-engine.ts'
import type { Tokenizer } from '../../text/tokenizer.ts'
import { needTokenizer } from './prompts.ts'
import { invalid } from '../refuse.ts'
import { nullable } from '../schemas.ts'

const MAX_WORDS = 1024
/** They are tokenized on this thread, in milliseconds. */
const MAX_WORDS_LENGTH = 16 * 1024

/** vLLM's lists of tokens that may, and texts that may not, be generated. */
export const tokenListFields = {
  allowed_token_ids: nullable(Type.Array(Type.Integer()), 'No other tokens are generated.'),
  bad_words: nullable(
    Type.Array(Type.String({ maxLength: 1024 }), { maxItems: MAX_WORDS }),
    'Texts that are not generated: the token that would complete one is banned.'
  )
}

interface Fields {
  allowed_token_ids?: number[] | null
  bad_words?: string[] | null
}

export function readTokenLists (
  { allowed_token_ids: allowed, bad_words: words }: Fields,
  { vocabSize }: EngineInfo,
  tokenizer: Tokenizer | null,
  prefix: string
): Pick<SamplingParams, 'allowedTokenIds' | 'badWords'> {
  if (allowed?.length === 0) throw invalid(`${prefix}allowed_token_ids`, 'is empty; leave it out to allow all tokens')
  const length = words?.reduce((sum, word) => sum + word.length, 0) ?? 0
  if (length > MAX_WORDS_LENGTH) {
    throw invalid(`${prefix}bad_words`, `expected at most ${MAX_WORDS_LENGTH} characters together, got ${length}`)
  }
  const stray = allowed?.find(id => id < 0 || id >= vocabSize)
  if (stray !== undefined) {
    throw invalid(`${prefix}allowed_token_ids`, `has ${stray}; expected token ids from 0 to ${vocabSize - 1}`)
  }
  return {
    ...allowed == null ? {} : { allowedTokenIds: allowed },
    ...words == null || words.length === 0
      ? {}
      : { badWords: words.flatMap(word => tokensOf(word, needTokenizer(tokenizer, `${prefix}bad_words`), prefix)) }
  }
}

/** As vLLM: the word as it begins a text, and as it follows a space if that changes its first token only. */
function tokensOf (word: string, tokenizer: Tokenizer, prefix: string): number[][] {
  const bare = word.trimStart()
  const plain = tokenizer.encode(bare, { addSpecialTokens: false })
  const spaced = tokenizer.encode(` ${bare}`, { addSpecialTokens: false })
  if (bare === '' || plain.length === 0) throw invalid(`${prefix}bad_words`, `${JSON.stringify(word)} has no tokens`)
  return spaced[0] !== plain[0] && spaced.length === plain.length ? [plain, spaced] : [plain]
}
