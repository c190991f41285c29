import { RefitError } from '../../errors.ts'
import type { Grammars } from '../../grammars/grammars.ts'
import { maskWords } from '../../native/step.ts'
import type { GenerateRequest } from '../../contract/rollout-engine.ts'
import { TokenConstraint } from '../sequences/token-constraint.ts'

/** Makes the constraints of requests. */
export class Constraints {
  readonly #vocabSize: number
  readonly #grammars: Grammars | null
  /** The last list of allowed tokens: the samples of one request have the same. */
  #last: { ids: readonly number[], mask: Uint32Array } | null = null

  /** `grammars`: null if this engine has none. */
  constructor (vocabSize: number, grammars: Grammars | null) {
    this.#vocabSize = vocabSize
    this.#grammars = grammars
  }

  /** Null for a request that may generate any token. Throws for a grammar that cannot be followed. */
  of ({ grammar, sampling: { allowedTokenIds } }: GenerateRequest): TokenConstraint | null {
    if (grammar === undefined && allowedTokenIds === undefined) return null
    if (grammar !== undefined && this.#grammars === null) {
      throw new RefitError(
        'UNSUPPORTED',
        'this engine has no grammars (it has no tokenizer, or --grammar-backend none); ' +
          `the request has one of kind ${grammar.kind}`,
        { param: grammar.kind }
      )
    }
    const matcher = grammar === undefined ? null : this.#grammars!.matcher(grammar)
    return new TokenConstraint(allowedTokenIds === undefined ? null : this.#maskOf(allowedTokenIds), matcher)
  }

  #maskOf (ids: readonly number[]): Uint32Array {
    const last = this.#last
    if (last !== null && last.ids.length === ids.length && last.ids.every((id, i) => id === ids[i])) return last.mask
    const mask = new Uint32Array(maskWords(this.#vocabSize))
    for (const id of ids) mask[id >>> 5]! |= 1 << (id & 31)
    this.#last = { ids, mask }
    return mask
  }
}
