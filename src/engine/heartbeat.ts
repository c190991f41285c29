// Int32 fields: number of steps begun, number of steps ended, load of the events that the main thread has delivered,
// requests in the last step of even number and of odd number, numbers of the requests of either.
const BEGUN = 0
const ENDED = 1
const DELIVERED = 2
const COUNTS = 3
const IDS = 5

/**
 * The scheduler thread's steps under way, at most two, in memory shared with the main thread. The main thread notices
 * steps that do not end, and knows their requests although the scheduler's thread is stuck.
 */
export class Heartbeat {
  readonly #fields: Int32Array

  /** `sequences`: most requests in a step. */
  static allocate (sequences: number): SharedArrayBuffer {
    return new SharedArrayBuffer(4 * (IDS + 2 * sequences))
  }

  constructor (memory: SharedArrayBuffer) {
    this.#fields = new Int32Array(memory)
  }

  /** Scheduler's thread: a step begins. */
  begin (sequences: readonly { id: number }[]): void {
    const fields = this.#fields
    const side = fields[BEGUN]! & 1
    const first = this.#first(side)
    const count = Math.min(sequences.length, this.#most)
    for (let i = 0; i < count; i++) fields[first + i] = sequences[i]!.id
    fields[COUNTS + side] = count
    // Atomic, so that a thread that sees the step also sees its requests.
    Atomics.add(fields, BEGUN, 1)
  }

  /** The last step has not begun after all. */
  cancel (): void {
    const fields = this.#fields
    fields[COUNTS + ((fields[BEGUN]! - 1) & 1)] = 0
    Atomics.sub(fields, BEGUN, 1)
  }

  /** The first step under way has ended. */
  end (): void {
    const fields = this.#fields
    fields[COUNTS + (fields[ENDED]! & 1)] = 0
    Atomics.add(fields, ENDED, 1)
  }

  /** Main thread: it has delivered events of this load. The sum wraps around. */
  delivered (load: number): void {
    Atomics.add(this.#fields, DELIVERED, load)
  }

  /** Scheduler's thread: the load of events that it has sent and that are not delivered, of those sent in all. */
  undelivered (sent: number): number {
    return (sent - Atomics.load(this.#fields, DELIVERED)) | 0
  }

  /** Any thread: number of the first step under way (it wraps around), null when none is. */
  get step (): number | null {
    const ended = Atomics.load(this.#fields, ENDED)
    return ended === Atomics.load(this.#fields, BEGUN) ? null : (ended + 1) | 0
  }

  /** Requests of the steps under way, as int32. */
  get ids (): number[] {
    const of = (side: number): Int32Array =>
      this.#fields.subarray(this.#first(side), this.#first(side) + this.#fields[COUNTS + side]!)
    return [...new Set([...of(0), ...of(1)])]
  }

  get #most (): number {
    return (this.#fields.length - IDS) / 2
  }

  #first (side: number): number {
    return IDS + side * this.#most
  }
}
