import { RefitError } from '../errors.ts'
import type { RolloutEngine } from '../contract/rollout-engine.ts'

/**
 * Ids of the requests under way as clients know them, each with the engine requests behind it: a batch or n samples are several
 * there. What `/abort_request` names is looked up here.
 */
export class LiveRequests {
  readonly #engine: RolloutEngine
  readonly #engineRids = new Map<string, string[]>()

  constructor (engine: RolloutEngine) {
    this.#engine = engine
  }

  /** Claims `names`; throws when one is taken, then none is. The function gives them back. */
  claim (names: Map<string, string[]>): () => void {
    for (const name of names.keys()) {
      if (this.#engineRids.has(name)) throw duplicate(name)
    }
    for (const [name, rids] of names) this.#engineRids.set(name, rids)
    return () => {
      for (const name of names.keys()) this.#engineRids.delete(name)
    }
  }

  /** Aborts the request of that name, or all whose names begin with it. An unknown name is no error: it may have just ended. */
  abort (name: string, prefix: boolean): void {
    if (name === '') return
    const found = prefix
      ? [...this.#engineRids].filter(([known]) => known.startsWith(name)).flatMap(([, rids]) => rids)
      : this.#engineRids.get(name) ?? []
    for (const rid of new Set(found)) this.#engine.abort(rid)
  }
}

export function duplicate (name: string): RefitError {
  return new RefitError('INVALID_REQUEST', `Duplicate request ID detected: ${name}`, { param: 'rid' })
}
