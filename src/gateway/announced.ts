import { createHash } from 'node:crypto'
import type { Worker } from './worker.ts'

/**
 * What engines were told before the update that depends on it, and which of them took it. One that was down for a moment looks like the others
 * until the update comes, and answers it like the others: with what it has.
 */
export class Announced {
  /** By kind: by digest of the body, as one that is sent again is the same. */
  readonly #kinds = new Map<string, Map<string, Set<Worker>>>()

  /** `isFirst`: what was announced before is forgotten. What no engine took was not announced. */
  took (kind: string, isFirst: boolean, body: Buffer, workers: readonly Worker[]): void {
    if (workers.length === 0) return
    const known = isFirst ? undefined : this.#kinds.get(kind)
    const bodies = known ?? new Map<string, Set<Worker>>()
    const digest = createHash('sha256').update(body).digest('base64')
    bodies.set(digest, new Set([...bodies.get(digest) ?? [], ...workers]))
    this.#kinds.set(kind, bodies)
  }

  /** Those that have not taken all of it. */
  lacking (kind: string, workers: readonly Worker[]): Worker[] {
    const taken = [...this.#kinds.get(kind)?.values() ?? []]
    return workers.filter(worker => taken.some(set => !set.has(worker)))
  }

  /** It was brought. */
  end (kind: string): void {
    this.#kinds.delete(kind)
  }

  /** It was started anew, and knows nothing. */
  forget (worker: Worker): void {
    for (const bodies of this.#kinds.values()) for (const set of bodies.values()) set.delete(worker)
  }
}
