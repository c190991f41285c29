type Run = () => Promise<void>

/**
 * The gate, for what a group does only between two steps: connecting and allocating. A request that has shut the gate
 * may wait for an earlier request that needs it, so it lends it meanwhile.
 */
export class LentGate {
  readonly #request: (run: Run) => Promise<void>
  #lenders = 0
  readonly #guests = new Set<Promise<void>>()
  /** Calls of `use` that wait. */
  readonly #waiting = new Set<() => void>()

  /** `request`: runs a function with the gate shut. */
  constructor (request: (run: Run) => Promise<void>) {
    this.#request = request
  }

  /** Runs with the gate shut, once. */
  async shut (run: Run): Promise<void> {
    await this.#request(run)
  }

  /** The same, and at once while another request lends the gate. */
  async use (run: Run): Promise<void> {
    let running: Promise<void> | undefined
    const start = async (): Promise<void> => {
      await (running ??= run())
    }
    if (this.#lenders > 0) return await this.#host(start)
    await new Promise<void>((resolve, reject) => {
      const enter = (): void => {
        this.#host(start).then(resolve, reject)
      }
      this.#waiting.add(enter)
      const ended = (): void => {
        this.#waiting.delete(enter)
      }
      // If the gate is lent first, this request finds that `run` has begun; or it gets no gate while `run` goes on.
      const shut = this.shut(start).catch(async (error: unknown) => {
        if (running !== undefined) return await running
        // At once: a lender that comes before this promise settles would run what the caller is told has not begun.
        ended()
        throw error
      })
      shut.finally(ended).then(resolve, reject)
    })
  }

  /** Lends the gate, which the caller has shut, until `run` and all that began meanwhile have ended. */
  async lend (run: Run): Promise<void> {
    this.#lenders++
    for (const enter of this.#waiting) enter()
    try {
      await run()
    } finally {
      this.#lenders--
      await Promise.allSettled(this.#guests)
    }
  }

  async #host (start: Run): Promise<void> {
    const guest = start()
    this.#guests.add(guest)
    try {
      await guest
    } finally {
      this.#guests.delete(guest)
    }
  }
}
