import { generateText } from '../../engine/text-generation.ts'
import type { TextEvent } from '../../engine/text-generation.ts'
import type { RouteContext } from '../context.ts'
import type { SampleRequest } from '../generation.ts'

/** Events of one sample with their text. */
export function textEvents ({ engine, tokenizer }: RouteContext, plan: SampleRequest): AsyncIterable<TextEvent> {
  const { rid, promptIds: inputIds, sampling, logprobs, cacheSalt, expertsFrom, text } = plan
  const request = {
    rid,
    inputIds,
    sampling,
    logprobs,
    ...cacheSalt === undefined ? {} : { cacheSalt },
    ...expertsFrom === undefined ? {} : { expertsFrom }
  }
  const detokenizer = tokenizer?.detokenizer({
    skipSpecialTokens: text.skipSpecialTokens,
    spacesBetweenSpecialTokens: text.spacesBetweenSpecialTokens,
    context: inputIds
  }) ?? null
  // Base models end their turns with a special token that is not one of their eos ids; clients name it by its text, as
  // SGLang allows.
  const unseen = (id: number): string => {
    if (tokenizer === null || !text.skipSpecialTokens || text.stop.length === 0 || !tokenizer.specialIds.has(id)) {
      return ''
    }
    const special = tokenizer.idToText(id)
    return text.stop.some(stop => stop.includes(special)) ? special : ''
  }
  return generateText(engine, request, detokenizer, { ...text, unseen })
}
