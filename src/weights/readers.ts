/** Counts the reads of weights under way. A release of their memory waits until there are none. */
export class Readers {
  #count = 0
  #waiting: (() => void)[] = []

  async read<T> (run: () => Promise<T>): Promise<T> {
    this.#count++
    try {
      return await run()
    } finally {
      if (--this.#count === 0) { for (const resolve of this.#waiting.splice(0)) resolve() }
    }
  }

  /** Resolves when no read is under way. The caller prevents new ones. */
  async idle (): Promise<void> {
    if (this.#count > 0) {
      await new Promise<void>(resolve => {
        this.#waiting.push(resolve)
      })
    }
  }
}
