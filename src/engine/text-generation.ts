import type { Detokenizer } from '../text/tokenizer.ts'
import type { FinishReason, GenerateRequest, RolloutEngine, TokenEvent } from '../contract/rollout-engine.ts'
import { StopMatcher } from './scheduling/stop-matcher.ts'
import type { StopPatterns } from './stop-patterns.ts'

export interface TextStopOptions {
  /** Strings that end the text, across token borders too. */
  stop: readonly string[]
  /** Leaves the stop string, or the text of the stop token, in the text. */
  noStopTrim: boolean
  /** Patterns that end the text at the token that completes a match. The match stays in the text. */
  patterns?: StopPatterns | undefined
  /** Text of a special token that the detokenizer leaves out, if a stop string may contain it; otherwise empty. */
  unseen?: (token: number) => string
  /** Text of a special token that the detokenizer leaves out, for `patterns`; otherwise empty. */
  special?: (token: number) => string
}

/** A token event with its text. Text that may be the beginning of a stop string comes with a later event. */
export type TextEvent = TokenEvent & { text: string }

/**
 * Adds text to the token events of one request. A stop string ends the request with the token that completes it: later
 * tokens are cut from the output, and the engine's request is aborted. It has no effect before `minNewTokens` tokens,
 * and takes precedence over an end by length at the same token. Without a detokenizer, all text is empty and stop
 * strings and patterns cannot match.
 */
export async function* generateText (
  engine: Pick<RolloutEngine, 'generate' | 'abort'>,
  request: GenerateRequest,
  detokenizer: Detokenizer | null,
  options: TextStopOptions
): AsyncGenerator<TextEvent, void, undefined> {
  const matcher = new StopMatcher(options.stop, options.noStopTrim)
  const patterns = options.patterns?.matcher()
  const { minNewTokens } = request.sampling
  /** The event that a stop string has ended, until its experts arrive with the engine's last event. */
  let stopped: TextEvent | null = null
  for await (const event of engine.generate(request)) {
    if (stopped !== null) {
      if (event.finish === null) continue
      yield { ...stopped, ...expertsOf(event, request, stopped.completionTokens) }
      return
    }
    const { tokens, finish } = event
    const before = event.completionTokens - tokens.length
    let text = ''
    for (let i = 0; i < tokens.length; i++) {
      if (i === tokens.length - 1 && !options.noStopTrim && endsAtToken(finish)) break
      const unseen = options.unseen?.(tokens[i]!) ?? ''
      const seen = detokenizer?.push([tokens[i]!]) ?? ''
      const obey = before + i + 1 >= minNewTokens
      const outcome = matcher.push(unseen === '' ? seen : unseen, obey, unseen === '')
      text += outcome.text
      const pattern = patterns?.push(seen + (options.special?.(tokens[i]!) ?? ''), obey) ?? null
      const matched = outcome.matched ?? pattern
      if (matched === null) continue
      if (outcome.matched === null) text += matcher.flush()
      stopped = { ...cut(event, i + 1), text, finish: { type: 'stop', matched } }
      break
    }
    if (stopped !== null) {
      if (finish === null && request.expertsFrom !== undefined) {
        engine.abort(request.rid)
        continue
      }
      yield { ...stopped, ...expertsOf(event, request, stopped.completionTokens) }
      return
    }
    if (finish === null) {
      yield { ...event, text }
      continue
    }
    // Incomplete characters, and text that was held back without a match.
    const rest = detokenizer?.flush() ?? ''
    const last = matcher.push(rest)
    const matched = last.matched ?? patterns?.push(rest) ?? null
    if (matched !== null) {
      yield {
        ...event,
        text: text + last.text + (last.matched === null ? matcher.flush() : ''),
        finish: { type: 'stop', matched }
      }
    } else yield { ...event, text: text + last.text + matcher.flush() }
    return
  }
}

function endsAtToken (finish: FinishReason | null): boolean {
  return finish?.type === 'stop' && typeof finish.matched === 'number'
}

/** The experts of an engine's last event, cut to an output of its first `completionTokens` tokens. */
function expertsOf (
  { experts, promptTokens, completionTokens }: TokenEvent,
  { expertsFrom = 0 }: GenerateRequest,
  kept: number
): { experts?: Uint16Array } {
  if (experts === undefined) return {}
  const rows = (tokens: number): number => Math.max(0, promptTokens + tokens - 1 - expertsFrom)
  return { experts: experts.subarray(0, rows(kept) * experts.length / Math.max(1, rows(completionTokens))) }
}

/** The event with only its first `count` tokens. */
function cut (event: TokenEvent, count: number): TokenEvent {
  if (count === event.tokens.length) return event
  return {
    ...event,
    tokens: event.tokens.slice(0, count),
    logprobs: event.logprobs.slice(0, count),
    top: event.top.slice(0, count),
    ids: event.ids.slice(0, count),
    ...event.kept === undefined ? {} : { kept: event.kept.slice(0, count) },
    completionTokens: event.completionTokens - event.tokens.length + count
  }
}
