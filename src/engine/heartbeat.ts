// Int32 words: steps begun, steps ended, how many requests the last one has, their numbers.
const BEGUN = 0
const ENDED = 1
const COUNT = 2
const IDS = 3

/**
 * What the scheduler's thread is computing, in memory that the main thread sees too: a step that does not end is noticed there, and
 * the requests in it are known although their thread can say nothing any more.
 */
export class Heartbeat {
  readonly #words: Int32Array

  /** `sequences`: most requests of a step. */
  static allocate (sequences: number): SharedArrayBuffer {
    return new SharedArrayBuffer(4 * (IDS + sequences))
  }

  constructor (memory: SharedArrayBuffer) {
    this.#words = new Int32Array(memory)
  }

  /** Scheduler's thread: a step begins. */
  begin (sequences: readonly { id: number }[]): void {
    const words = this.#words
    const count = Math.min(sequences.length, words.length - IDS)
    for (let i = 0; i < count; i++) words[IDS + i] = sequences[i]!.id
    words[COUNT] = count
    // Atomic, so that who sees the step sees its requests.
    Atomics.add(words, BEGUN, 1)
  }

  end (): void {
    Atomics.add(this.#words, ENDED, 1)
  }

  /** Any thread: number of the step under way (it wraps), null between steps. */
  get step (): number | null {
    const begun = Atomics.load(this.#words, BEGUN)
    return begun === Atomics.load(this.#words, ENDED) ? null : begun
  }

  /** Requests of the step under way, as int32. */
  get ids (): number[] {
    return [...this.#words.subarray(IDS, IDS + this.#words[COUNT]!)]
  }
}
