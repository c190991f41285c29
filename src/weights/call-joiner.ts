/**
 * Joins identical calls: while a call runs under a key, others under the same key get its outcome instead of a second
 * run. A client that retries after a lost reply never applies an update twice at once.
 */
export class CallJoiner<T> {
  readonly #running = new Set<{ key: readonly string[], outcome: Promise<T> }>()

  /**
   * A key of several texts is compared text by text. To concatenate or hash megabytes of handles takes longer than to
   * find the first difference.
   */
  join (key: string | readonly string[], run: () => Promise<T>): Promise<T> {
    const texts = typeof key === 'string' ? [key] : key
    for (const call of this.#running) if (same(call.key, texts)) return call.outcome
    const call = { key: texts, outcome: run().finally(() => this.#running.delete(call)) }
    this.#running.add(call)
    return call.outcome
  }
}

function same (a: readonly string[], b: readonly string[]): boolean {
  return a.length === b.length && a.every((text, index) => text === b[index])
}
