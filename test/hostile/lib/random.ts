/** Numbers that follow from a seed (mulberry32), so that a round can be repeated. */
export class Random {
  #state: number

  constructor (seed: number) {
    this.#state = seed >>> 0
  }

  /** From 0 up to, not including, 1. */
  next (): number {
    this.#state = (this.#state + 0x6d2b79f5) >>> 0
    let mixed = Math.imul(this.#state ^ (this.#state >>> 15), this.#state | 1)
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61)
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32
  }

  /** From 0 up to, not including, `end`. */
  below (end: number): number {
    return Math.floor(this.next() * end)
  }

  pick<T> (from: readonly T[]): T {
    return from[this.below(from.length)]!
  }

  /** `count` different elements, or all of them. */
  some<T> (from: readonly T[], count: number): T[] {
    const rest = [...from]
    return Array.from({ length: Math.min(count, rest.length) }, () => rest.splice(this.below(rest.length), 1)[0]!)
  }

  bytes (length: number): Buffer {
    return Buffer.from(Array.from({ length }, () => this.below(256)))
  }

  /** The bytes with `count` of them changed, taken out or put in. */
  damaged (bytes: Uint8Array, count: number): Buffer {
    const list = [...bytes]
    for (let i = 0; i < count; i++) {
      const at = this.below(list.length + 1)
      const kind = this.below(3)
      if (kind === 0) list[Math.min(at, list.length - 1)] = this.below(256)
      else if (kind === 1) list.splice(at, 1 + this.below(4))
      else list.splice(at, 0, ...this.bytes(1 + this.below(4)))
    }
    return Buffer.from(list)
  }
}
