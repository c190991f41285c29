/** Counts the reads of weights under way. A release of their memory waits until there are none. */
export class Readers {
  #count = 0
  #waiting: (() => void)[] = []
  readonly #values = new Set<Promise<unknown>>()

  async read<T> (run: () => Promise<T>): Promise<T> {
    this.#count++
    try {
      return await run()
    } finally {
      if (--this.#count === 0) { for (const resolve of this.#waiting.splice(0)) resolve() }
    }
  }

  /** The same for a read of the values of weights in use, which may go on after another set has come into use. */
  async readValues<T> (run: () => Promise<T>): Promise<T> {
    const reading = this.read(run)
    this.#values.add(reading)
    try {
      return await reading
    } finally {
      this.#values.delete(reading)
    }
  }

  /** Resolves when the reads of values that are under way now have ended. */
  async valuesRead (): Promise<void> {
    await Promise.allSettled(this.#values)
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
