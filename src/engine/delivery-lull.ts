import { collectYoungGarbage } from './young-garbage.ts'

/** Without tokens for so long, no step is under way that soon delivers some. */
const QUIET_MS = 50

/**
 * The time right after the tokens of a step have been delivered. Work of the main thread that begins then is over, most
 * of the time, when the tokens of the next step arrive; begun later, it would hold them up.
 */
export class DeliveryLull {
  readonly #waiting = new Set<() => void>()
  #last = -Infinity

  begin (): void {
    collectYoungGarbage()
    this.#last = performance.now()
    for (const resume of this.#waiting) resume()
    this.#waiting.clear()
  }

  /** Resolves when the next one begins, or at once while no tokens are delivered. */
  async next (): Promise<void> {
    if (performance.now() - this.#last > QUIET_MS) return
    await new Promise<void>(resolve => {
      const timer = setTimeout(resume, QUIET_MS)
      this.#waiting.add(resume)

      function resume (): void {
        clearTimeout(timer)
        resolve()
      }
    })
  }
}
