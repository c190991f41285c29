import type { GrammarMatcher } from '../../grammars/grammar-matcher.ts'

/** Which tokens one sequence may generate next: a list of allowed tokens, a grammar, or both. */
export class TokenConstraint {
  readonly #allowed: Uint32Array | null
  readonly #matcher: GrammarMatcher | null
  /** The next mask; undefined until it is needed. */
  #mask: Uint32Array | null | undefined

  constructor (allowed: Uint32Array | null, matcher: GrammarMatcher | null) {
    this.#allowed = allowed
    this.#matcher = matcher
  }

  /** One that stands at the same place, and goes on by itself. */
  fork (): TokenConstraint {
    return new TokenConstraint(this.#allowed, this.#matcher?.fork() ?? null)
  }

  /** How many of these tokens may come next, each of them with some token after it. */
  follow (tokens: readonly number[]): number {
    const ahead = this.fork()
    const end = tokens.findIndex(token => !ahead.accept(token) || ahead.ended || ahead.isStuck)
    return end < 0 ? tokens.length : end
  }

  /** A bit for every allowed token; null if all are allowed. */
  get mask (): Uint32Array | null {
    if (this.#mask === undefined) this.#mask = both(this.#allowed, this.#matcher?.mask() ?? null)
    return this.#mask
  }

  /** No token is allowed: the vocabulary has none that continues the text. */
  get isStuck (): boolean {
    return this.mask !== null && this.mask.every(word => word === 0)
  }

  /** Only a token that ends the text is allowed. */
  get mustEnd (): boolean {
    return this.#matcher?.mustEnd ?? false
  }

  /** The grammar has ended. */
  get ended (): boolean {
    return this.#matcher?.ended ?? false
  }

  /** Takes the next token; false if it is not allowed. */
  accept (token: number): boolean {
    if (this.#allowed !== null && (this.#allowed[token >>> 5]! >>> (token & 31) & 1) === 0) return false
    this.#mask = undefined
    return this.#matcher?.accept(token) ?? true
  }
}

export function stuckAfter (tokens: number): string {
  return `no token of the model continues the output after ${tokens} tokens: the grammar, allowed_token_ids and the ` +
    "model's vocabulary leave none"
}

export function notAllowed (token: number): string {
  return `the device sampled token ${token}, which the request's constraint does not allow: all allowed tokens ` +
    'have a logit of -Infinity or NaN, by bad_words, min_tokens or the weights'
}

function both (a: Uint32Array | null, b: Uint32Array | null): Uint32Array | null {
  if (a === null || b === null) return a ?? b
  return a.map((word, i) => word & b[i]!)
}
