import { RefitError } from '../../errors.ts'
import type { RolloutEngine } from '../../contract/rollout-engine.ts'
import type { Sample } from './sample.ts'

/**
 * Ids of the requests under way as clients know them, each with its engine requests: a batch or n samples are several
 * there. `/abort_request` looks ids up here.
 */
export class LiveRequests {
  /** The samples of all requests under way. */
  readonly samples = new Set<Sample>()
  readonly #engine: RolloutEngine
  readonly #engineRids = new Map<string, string[]>()

  constructor (engine: RolloutEngine) {
    this.#engine = engine
  }

  /**
   * Claims `names` for these samples. Throws if one of them is taken, and then claims none. The returned function
   * releases them.
   */
  claim (names: Map<string, string[]>, samples: readonly Sample[]): () => void {
    for (const name of names.keys()) {
      if (this.#engineRids.has(name)) throw duplicate(name)
    }
    for (const [name, rids] of names) this.#engineRids.set(name, rids)
    for (const sample of samples) this.samples.add(sample)
    return () => {
      for (const sample of samples) this.samples.delete(sample)
      for (const name of names.keys()) this.#engineRids.delete(name)
    }
  }

  /**
   * Aborts the request with that id, or all whose ids begin with it. An unknown id is no error: its request may have
   * just ended.
   */
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
