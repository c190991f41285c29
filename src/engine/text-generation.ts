import type { Detokenizer } from '../text/tokenizer.ts'
import type { FinishReason, GenerateRequest, RolloutEngine, TokenEvent } from '../contract/rollout-engine.ts'
import { MappedEvents } from './mapped-events.ts'
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
export function generateText (
  engine: Pick<RolloutEngine, 'generate' | 'abort'>,
  request: GenerateRequest,
  detokenizer: Detokenizer | null,
  options: TextStopOptions
): MappedEvents<TokenEvent, TextEvent> {
  const output = new TextOutput(request, detokenizer, options, () => {
    engine.abort(request.rid)
  })
  return new MappedEvents({ open: () => engine.generate(request), map: event => output.push(event) })
}

/** The text of one request. */
class TextOutput {
  readonly #request: GenerateRequest
  readonly #detokenizer: Detokenizer | null
  readonly #options: TextStopOptions
  readonly #abort: () => void
  readonly #matcher: StopMatcher
  readonly #patterns: ReturnType<StopPatterns['matcher']> | undefined
  /** The event that a stop string has ended, until its experts arrive with the engine's last event. */
  #stopped: TextEvent | null = null

  constructor (
    request: GenerateRequest,
    detokenizer: Detokenizer | null,
    options: TextStopOptions,
    abort: () => void
  ) {
    this.#request = request
    this.#detokenizer = detokenizer
    this.#options = options
    this.#abort = abort
    this.#matcher = new StopMatcher(options.stop, options.noStopTrim)
    this.#patterns = options.patterns?.matcher()
  }

  /** The event with its text; null if it is left out. */
  push (event: TokenEvent): TextEvent | null {
    if (this.#stopped !== null) return event.finish === null ? null : this.#withExperts(this.#stopped, event)
    const text = this.#textOf(event)
    const { finish } = event
    if (this.#stopped !== null) {
      if (finish !== null || this.#request.expertsFrom === undefined) return this.#withExperts(this.#stopped, event)
      this.#abort()
      return null
    }
    if (finish === null) return withText(event, text)
    // Incomplete characters, and text that was held back without a match.
    const rest = this.#detokenizer?.flush() ?? ''
    const last = this.#matcher.push(rest)
    const matched = last.matched ?? this.#patterns?.push(rest) ?? null
    if (matched === null) return withText(event, text + last.text + this.#matcher.flush())
    event.finish = { type: 'stop', matched }
    return withText(event, text + last.text + (last.matched === null ? this.#matcher.flush() : ''))
  }

  /** Text of the event's tokens, up to the one that ends it. */
  #textOf (event: TokenEvent): string {
    const { tokens, finish } = event
    const { noStopTrim, unseen, special } = this.#options
    const before = event.completionTokens - tokens.length
    let text = ''
    for (let i = 0; i < tokens.length; i++) {
      if (i === tokens.length - 1 && !noStopTrim && endsAtToken(finish)) break
      const hidden = unseen?.(tokens[i]!) ?? ''
      const seen = this.#detokenizer?.push([tokens[i]!]) ?? ''
      const obey = before + i + 1 >= this.#request.sampling.minNewTokens
      const outcome = this.#matcher.push(hidden === '' ? seen : hidden, obey, hidden === '')
      text += outcome.text
      const pattern = this.#patterns?.push(seen + (special?.(tokens[i]!) ?? ''), obey) ?? null
      const matched = outcome.matched ?? pattern
      if (matched === null) continue
      if (outcome.matched === null) text += this.#matcher.flush()
      this.#stopped = { ...cut(event, i + 1), text, finish: { type: 'stop', matched } }
      break
    }
    return text
  }

  /** The engine's last event has the experts of its whole output; `stopped` keeps those of its own tokens. */
  #withExperts (stopped: TextEvent, { experts, promptTokens, completionTokens }: TokenEvent): TextEvent {
    if (experts === undefined) return stopped
    const { expertsFrom = 0 } = this.#request
    const rows = (tokens: number): number => Math.max(0, promptTokens + tokens - 1 - expertsFrom)
    const kept = rows(stopped.completionTokens) * experts.length / Math.max(1, rows(completionTokens))
    return { ...stopped, experts: experts.subarray(0, kept) }
  }
}

function withText (event: TokenEvent, text: string): TextEvent {
  return Object.assign(event, { text })
}

function endsAtToken (finish: FinishReason | null): boolean {
  return finish?.type === 'stop' && typeof finish.matched === 'number'
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
