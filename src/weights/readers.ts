/** Reads of weights under way: who is about to take the memory away waits for them. */
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

  /** Resolves once none is under way. The caller has seen to it that none begins. */
  async idle (): Promise<void> {
    if (this.#count > 0) {
      await new Promise<void>(resolve => {
        this.#waiting.push(resolve)
      })
    }
  }
}
