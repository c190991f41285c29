import { collectYoungGarbage } from './young-garbage.ts'

/** Without tokens for so long, no step is under way that soon delivers some. */
const QUIET_MS = 50
/** The part of the time between two deliveries in which work may still begin. */
const EARLY = 0.25

/**
 * The time right after the tokens of a step have been delivered. Work of the main thread that begins then is over, most
 * of the time, when the tokens of the next step arrive; begun later, it would hold them up.
 */
export class DeliveryLull {
  readonly #waiting = new Set<() => void>()
  readonly #quietMs: number
  #isQuiet = true
  /** When the last one began. */
  #began = 0
  /** The time between the last two; 0 if the first of them was long ago. */
  #intervalMs = 0
  #quiet: NodeJS.Timeout | undefined

  constructor (quietMs = QUIET_MS) {
    this.#quietMs = quietMs
  }

  /** `isLast`: no requests are left. */
  begin (isLast = false): void {
    const now = performance.now()
    this.#intervalMs = this.#isQuiet ? 0 : now - this.#began
    this.#began = now
    this.#isQuiet = isLast
    collectYoungGarbage()
    this.#quiet ??= setTimeout(() => {
      this.#isQuiet = true
      this.#resume()
    }, this.#quietMs)
      .unref()
    this.#quiet.refresh()
    this.#resume()
  }

  /** Resolves when one begins, at once if one has just begun or no tokens are delivered any more. */
  async next (): Promise<void> {
    if (this.#isQuiet || performance.now() - this.#began < EARLY * this.#intervalMs) return
    await new Promise<void>(resolve => {
      this.#waiting.add(resolve)
    })
  }

  #resume (): void {
    for (const resume of this.#waiting) resume()
    this.#waiting.clear()
  }
}
