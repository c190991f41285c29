import { createHash } from 'node:crypto'
import type { Worker } from './worker.ts'

/**
 * The announcements that an update depends on, and the engines that took each of them. An engine that was down for a
 * moment misses one without knowing it, and then accepts the update with the tensors that it knows of.
 */
export class Announcements {
  /** kind -> digest of the body -> engines. A repeated body is a retry and counts as the same announcement. */
  readonly #kinds = new Map<string, Map<string, Set<Worker>>>()

  /** `isFirst`: forgets the announcements before. An announcement that no engine took does not count. */
  add (kind: string, isFirst: boolean, body: Buffer, workers: readonly Worker[]): void {
    if (workers.length === 0) return
    const known = isFirst ? undefined : this.#kinds.get(kind)
    const bodies = known ?? new Map<string, Set<Worker>>()
    const digest = createHash('sha256').update(body).digest('base64')
    bodies.set(digest, new Set([...bodies.get(digest) ?? [], ...workers]))
    this.#kinds.set(kind, bodies)
  }

  /** The engines that missed at least one announcement. */
  incomplete (kind: string, workers: readonly Worker[]): Worker[] {
    const takers = [...this.#kinds.get(kind)?.values() ?? []]
    return workers.filter(worker => takers.some(set => !set.has(worker)))
  }

  /** The announced update was written. */
  end (kind: string): void {
    this.#kinds.delete(kind)
  }

  /** The engine was restarted and has forgotten all announcements. */
  forget (worker: Worker): void {
    for (const bodies of this.#kinds.values()) for (const set of bodies.values()) set.delete(worker)
  }
}
