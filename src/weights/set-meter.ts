import type { SetCounts, SetMeter } from '../contract/weight-update.ts'

type Watcher = Parameters<SetMeter['watch']>[0]

/** Counts what updates do with the two sets of weights of an engine. */
export class TwoSetMeter implements SetMeter {
  readonly counts: SetCounts = { updates: { swap: 0, in_place: 0 }, bytes: { received: 0, caught_up: 0 } }
  readonly #watchers = new Set<Watcher>()

  watch (watcher: Watcher): () => void {
    this.#watchers.add(watcher)
    return () => {
      this.#watchers.delete(watcher)
    }
  }

  /** The weights have been loaded: what comes now is counted. */
  start (): void {
    Object.assign(this.counts.updates, { swap: 0, in_place: 0 })
    Object.assign(this.counts.bytes, { received: 0, caught_up: 0 })
  }

  wroteInPlace (): void {
    this.counts.updates.in_place++
  }

  /** The sets have changed places; `ms`: after the last byte of the new one was in place. */
  swapped (ms: number): void {
    this.counts.updates.swap++
    for (const watcher of this.#watchers) watcher(ms / 1000)
  }

  wrote (kind: keyof SetCounts['bytes'], bytes: number): void {
    this.counts.bytes[kind] += bytes
  }
}
