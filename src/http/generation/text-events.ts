import { generateText } from '../../engine/text-generation.ts'
import type { TextEvent } from '../../engine/text-generation.ts'
import type { GenerationContext } from '../context.ts'
import type { Tokenizer } from '../../text/tokenizer.ts'
import type { SampleRequest } from './generation.ts'

/** The texts of special tokens that occur in a list of stop texts; all samples of a request have the same list. */
const SPECIALS = new WeakMap<readonly string[], Map<number, string>>()

/** The text of a special token if a stop text contains it; otherwise empty. Searches once for each token. */
function specialIn (stops: readonly string[], id: number, tokenizer: Tokenizer): string {
  let known = SPECIALS.get(stops)
  if (known === undefined) SPECIALS.set(stops, known = new Map())
  let special = known.get(id)
  if (special === undefined) {
    const text = tokenizer.idToText(id)
    special = stops.some(stop => stop.includes(text)) ? text : ''
    known.set(id, special)
  }
  return special
}

/** Events of one sample with their text. */
export function textEvents ({ engine, tokenizer }: GenerationContext, plan: SampleRequest): AsyncIterable<TextEvent> {
  const { rid, promptIds: inputIds, sampling, logprobs, cacheSalt, expertsFrom, scores, kept, grammar, adapter, text } =
    plan
  const request = {
    rid,
    inputIds,
    sampling,
    logprobs,
    ...cacheSalt === undefined ? {} : { cacheSalt },
    ...expertsFrom === undefined ? {} : { expertsFrom },
    ...scores === undefined ? {} : { scores },
    ...kept === true ? { kept } : {},
    ...grammar === undefined ? {} : { grammar },
    ...adapter === undefined ? {} : { adapter }
  }
  const detokenizer = tokenizer?.detokenizer({
    skipSpecialTokens: text.skipSpecialTokens,
    spacesBetweenSpecialTokens: text.spacesBetweenSpecialTokens,
    context: inputIds,
    ...text.visible === undefined ? {} : { visible: text.visible }
  }) ?? null
  // Base models end their turns with a special token that is not one of their eos ids; clients name it by its text, as
  // SGLang allows.
  const unseen = (id: number): string => {
    if (tokenizer === null || !text.skipSpecialTokens || text.stop.length === 0) return ''
    if (!tokenizer.specialIds.has(id) || text.visible?.has(id) === true) return ''
    return specialIn(text.stop, id, tokenizer)
  }
  const special = (id: number): string =>
    tokenizer !== null && text.skipSpecialTokens && tokenizer.specialIds.has(id) && text.visible?.has(id) !== true
      ? tokenizer.idToText(id)
      : ''
  return generateText(engine, request, detokenizer, { ...text, unseen, special })
}
