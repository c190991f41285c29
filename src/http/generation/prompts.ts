import { RefitError } from '../../errors.ts'
import type { EngineInfo } from '../../contract/rollout-engine.ts'
import type { Tokenizer } from '../../text/tokenizer.ts'
import { MAX_BATCH } from '../limits.ts'
import { invalid } from '../refuse.ts'
import { hasTime, nextTurn } from '../turns.ts'
import { DEFAULT_MAX_NEW_TOKENS } from './sampling.ts'

/** Checks token ids of a client against the vocabulary. `param` names the list. */
export function idsOf (ids: ArrayLike<number>, info: EngineInfo, param: string): Int32Array {
  if (ids.length === 0) throw new RefitError('INVALID_REQUEST', `${param} cannot be empty.`, { param })
  const checked = new Int32Array(ids.length)
  for (let i = 0; i < ids.length; i++) {
    const id = ids[i]!
    if (id < 0 || id >= info.vocabSize) {
      throw new RefitError(
        'INVALID_REQUEST',
        `${param}[${i}] is ${id}; expected a token id from 0 to ${info.vocabSize - 1}`,
        { param: `${param}[${i}]` }
      )
    }
    checked[i] = id
  }
  return checked
}

/** Texts of this length together are read on another thread: tokenizers take a second for a megabyte or two. */
export const LONG_TEXT = 16 * 1024
/** Ids whose text takes less than a millisecond. */
const DECODED_AT_ONCE = 4096

export interface EncodeOptions {
  addSpecialTokens?: boolean
  /** The ids are cut to the context afterwards, so a text may be longer. */
  isCut?: boolean
}

/** The ids of a text. `param` names it. */
export async function encodeText (
  tokenizer: Tokenizer | null,
  text: string,
  info: EngineInfo,
  param: string,
  options: EncodeOptions = {}
): Promise<Int32Array> {
  return (await encodeTexts(tokenizer, [text], info, () => param, options))[0]!
}

/** The ids of each prompt. The caller has checked the number of prompts. */
export async function encodeTexts (
  maybe: Tokenizer | null,
  texts: readonly string[],
  info: EngineInfo,
  nameOf: (index: number) => string,
  { addSpecialTokens = true, isCut = false }: EncodeOptions = {}
): Promise<Int32Array[]> {
  const tokenizer = needTokenizer(maybe, nameOf(0))
  if (!isCut) texts.forEach((text, i) => checkLength(text, tokenizer, info, nameOf(i)))
  const all = await idsOfTexts(tokenizer, texts, addSpecialTokens)
  return all.map((ids, i) => checkText(ids, info, nameOf(i)))
}

/** The ids of each text, however many. */
export async function idsOfTexts (
  tokenizer: Tokenizer,
  texts: readonly string[],
  addSpecialTokens: boolean
): Promise<ArrayLike<number>[]> {
  const length = texts.reduce((sum, text) => sum + text.length, 0)
  const reader = length < LONG_TEXT ? tokenizer : tokenizer.background ?? tokenizer
  const all: ArrayLike<number>[] = []
  // One after another, so that a batch does not hold the other thread for longer than one text.
  for (const text of texts) {
    const ids = reader.encode(text, { addSpecialTokens })
    all.push(ids instanceof Promise ? await ids : ids)
  }
  return all
}

/** `decode` in slices; megabytes of ids take a second. */
export async function decodeInTurns (
  tokenizer: Tokenizer,
  ids: readonly number[],
  skipSpecialTokens: boolean
): Promise<string> {
  if (ids.length <= DECODED_AT_ONCE) return tokenizer.decode(ids, { skipSpecialTokens })
  const detokenizer = tokenizer.detokenizer({ skipSpecialTokens })
  const texts: string[] = []
  for (let i = 0; i < ids.length; i += DECODED_AT_ONCE) {
    if (!hasTime()) await nextTurn()
    texts.push(detokenizer.push(ids.slice(i, i + DECODED_AT_ONCE)))
  }
  texts.push(detokenizer.flush())
  return texts.join('')
}

/** Refuses a text that has more tokens than the context, however few tokens its bytes make. */
function checkLength (text: string, { longestToken }: Tokenizer, { contextLength }: EngineInfo, param: string): void {
  const most = contextLength * (longestToken ?? Infinity)
  if (text.length * 3 <= most) return
  const bytes = Buffer.byteLength(text)
  if (bytes <= most) return
  throw new RefitError(
    'PROMPT_TOO_LONG',
    `The input (${bytes} bytes) is longer than the model's context length (${contextLength} tokens of at most ` +
      `${longestToken} bytes, so at most ${most} bytes).`,
    { param }
  )
}

function checkText (ids: ArrayLike<number>, info: EngineInfo, param: string): Int32Array {
  if (ids.length === 0) {
    throw new RefitError('INVALID_REQUEST', `${param} has no tokens; at least one is needed`, { param })
  }
  return idsOf(ids, info, param)
}

export function needTokenizer (tokenizer: Tokenizer | null, param: string): Tokenizer {
  if (tokenizer !== null) return tokenizer
  throw new RefitError(
    'UNSUPPORTED',
    `${param}: this server has no tokenizer (its model folder has none, or it was started with ` +
      '--skip-tokenizer-init); send token ids',
    { param }
  )
}

/**
 * How many tokens may be generated after a prompt. `fallback` is the default if the request names no number; see
 * `Sampling.maxNewTokens`.
 */
export function fitContext (
  promptTokens: number,
  wanted: number | null | undefined,
  { contextLength }: EngineInfo,
  param: string,
  fallback = DEFAULT_MAX_NEW_TOKENS
): number {
  const room = contextLength - promptTokens
  if (room < 0 || (room === 0 && wanted !== 0)) {
    throw new RefitError(
      'PROMPT_TOO_LONG',
      `The input (${promptTokens} tokens) is longer than the model's context length (${contextLength} tokens).`,
      { param }
    )
  }
  if (wanted === null || wanted === undefined) return Math.min(room, wanted === null ? room : fallback)
  if (wanted > room) {
    throw new RefitError(
      'PROMPT_TOO_LONG',
      `Requested token count exceeds the model's maximum context length of ${contextLength} tokens. ` +
        `You requested a total of ${
          promptTokens + wanted
        } tokens: ${promptTokens} tokens from the input messages and ${wanted} tokens for the completion. ` +
        'Please reduce the number of tokens in the input messages or the completion to fit within the limit.',
      { param }
    )
  }
  return wanted
}

/** Refuses a batch that can never be queued at once, with its own error instead of a full queue's. */
export function checkBatch (prompts: number, n: number, info: EngineInfo, maxBatch: number, param: string): void {
  const limit = Math.min(maxBatch, MAX_BATCH, info.maxRunningRequests + info.maxQueuedRequests)
  if (prompts * n > limit) {
    throw invalid(param, `expected at most ${limit} samples in one request, got ${prompts} prompts with n = ${n}`)
  }
}
