/**
 * Joins identical calls: while one runs under a key, others under the same key get its outcome instead of a second run.
 * A client's retry after a lost reply thereby never applies an update twice at once.
 */
export class Joiner<T> {
  readonly #running = new Map<string, Promise<T>>()

  join (key: string, run: () => Promise<T>): Promise<T> {
    const running = this.#running.get(key)
    if (running !== undefined) return running
    const started = run().finally(() => this.#running.delete(key))
    this.#running.set(key, started)
    return started
  }
}
