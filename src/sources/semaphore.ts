/** Admits a fixed number at a time, in order of arrival. */
export class Semaphore {
  #free: number
  readonly #waiting: (() => void)[] = []

  constructor (count: number) {
    this.#free = count
  }

  /** Resolves to the function that releases the admission. */
  async enter (): Promise<() => void> {
    if (this.#free > 0) this.#free--
    else {await new Promise<void>(resolve => {
        this.#waiting.push(resolve)
      })}
    return () => {
      const next = this.#waiting.shift()
      if (next === undefined) this.#free++
      else next()
    }
  }
}
