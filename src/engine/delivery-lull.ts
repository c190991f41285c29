import { collectYoungGarbage } from './young-garbage.ts'

/** Without tokens for so long, no step is under way that soon delivers some. */
const QUIET_MS = 50

/**
 * The time right after the tokens of a step have been delivered. Work of the main thread that begins then is over, most
 * of the time, when the tokens of the next step arrive; begun later, it would hold them up.
 */
export class DeliveryLull {
  readonly #waiting = new Set<() => void>()
  readonly #quietMs: number
  #isQuiet = true
  #quiet: NodeJS.Timeout | undefined

  constructor (quietMs = QUIET_MS) {
    this.#quietMs = quietMs
  }

  begin (): void {
    collectYoungGarbage()
    this.#isQuiet = false
    this.#quiet ??= setTimeout(() => {
      this.#isQuiet = true
      this.#resume()
    }, this.#quietMs)
      .unref()
    this.#quiet.refresh()
    this.#resume()
  }

  /** Resolves when the next one begins, or as soon as no tokens are delivered any more. */
  async next (): Promise<void> {
    if (this.#isQuiet) return
    await new Promise<void>(resolve => {
      this.#waiting.add(resolve)
    })
  }

  #resume (): void {
    for (const resume of this.#waiting) resume()
    this.#waiting.clear()
  }
}
