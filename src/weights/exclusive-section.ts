import { LONGEST_TIMER_MS } from '../contract/update-deadline.ts'
import { RefitError } from '../errors.ts'

/** A holder or a waiter. With names: others may be inside if they share none of them. Null: no other may be inside. */
interface Claim {
  names: ReadonlySet<string> | null
}
interface Waiter extends Claim {
  start: () => void
  refuse: (error: Error) => void
}

/**
 * Admits one holder at a time in order of arrival, or several whose names differ. A later one never overtakes a waiter
 * with a common name. The queue is bounded and every wait has a deadline.
 */
export class ExclusiveSection {
  readonly #limit: number
  readonly #inside = new Set<Claim>()
  #waiting: Waiter[] = []

  constructor (limit: number) {
    this.#limit = limit
  }

  /**
   * Resolves to the function that leaves the section. Throws CONFLICT if the queue is full, DEADLINE if the wait takes
   * too long.
   */
  async enter (deadlineMs: number, names: ReadonlySet<string> | null = null): Promise<() => void> {
    if (!this.#blocks({ names }, this.#waiting)) {
      const claim = { names }
      this.#inside.add(claim)
      return this.#leaveOnce(claim)
    }
    if (this.#waiting.length >= this.#limit) {
      throw new RefitError(
        'CONFLICT',
        `${this.#waiting.length} weight updates wait already; send updates one after another`
      )
    }
    return await new Promise((resolve, reject) => {
      const timer = setTimeout(() => {
        this.#waiting.splice(this.#waiting.indexOf(waiter), 1)
        reject(
          new RefitError('DEADLINE', `another weight update was still under way after ${Math.round(deadlineMs)} ms`)
        )
        this.#admit()
      }, Math.min(deadlineMs, LONGEST_TIMER_MS))
      const waiter: Waiter = {
        names,
        start: () => {
          clearTimeout(timer)
          resolve(this.#leaveOnce(waiter))
        },
        refuse: error => {
          clearTimeout(timer)
          reject(error)
        }
      }
      this.#waiting.push(waiter)
    })
  }

  /** Ends the wait of all current waiters with an error. Holders stay. */
  refuseWaiting (error: Error): void {
    for (const waiter of this.#waiting.splice(0)) waiter.refuse(error)
  }

  #leaveOnce (claim: Claim): () => void {
    return () => {
      if (this.#inside.delete(claim)) this.#admit()
    }
  }

  #admit (): void {
    const ahead: Waiter[] = []
    for (const waiter of this.#waiting) {
      if (this.#blocks(waiter, ahead)) {
        ahead.push(waiter)
      } else {
        this.#inside.add(waiter)
        waiter.start()
      }
    }
    this.#waiting = ahead
  }

  /** Whether a holder, or a waiter ahead, has a common name. */
  #blocks (claim: Claim, ahead: readonly Waiter[]): boolean {
    for (const other of this.#inside) if (collide(claim, other)) return true
    return ahead.some(other => collide(claim, other))
  }
}

function collide ({ names: some }: Claim, { names: others }: Claim): boolean {
  if (some === null || others === null) return true
  for (const name of some) if (others.has(name)) return true
  return false
}
