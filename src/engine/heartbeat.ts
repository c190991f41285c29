// Int32 fields: number of steps begun, number of steps ended, requests in the last step, load of the events that the
// main thread has delivered, numbers of the requests.
const BEGUN = 0
const ENDED = 1
const COUNT = 2
const DELIVERED = 3
const IDS = 4

/**
 * The scheduler thread's current step, in memory shared with the main thread. The main thread notices a step that does
 * not end, and knows its requests although the scheduler's thread is stuck.
 */
export class Heartbeat {
  readonly #fields: Int32Array

  /** `sequences`: most requests in a step. */
  static allocate (sequences: number): SharedArrayBuffer {
    return new SharedArrayBuffer(4 * (IDS + sequences))
  }

  constructor (memory: SharedArrayBuffer) {
    this.#fields = new Int32Array(memory)
  }

  /** Scheduler's thread: a step begins. */
  begin (sequences: readonly { id: number }[]): void {
    const fields = this.#fields
    const count = Math.min(sequences.length, fields.length - IDS)
    for (let i = 0; i < count; i++) fields[IDS + i] = sequences[i]!.id
    fields[COUNT] = count
    // Atomic, so that a thread that sees the step also sees its requests.
    Atomics.add(fields, BEGUN, 1)
  }

  end (): void {
    Atomics.add(this.#fields, ENDED, 1)
  }

  /** Main thread: it has delivered events of this load. The sum wraps around. */
  delivered (load: number): void {
    Atomics.add(this.#fields, DELIVERED, load)
  }

  /** Scheduler's thread: the load of events that it has sent and that are not delivered, of those sent in all. */
  undelivered (sent: number): number {
    return (sent - Atomics.load(this.#fields, DELIVERED)) | 0
  }

  /** Any thread: number of the step under way (it wraps around), null between steps. */
  get step (): number | null {
    const begun = Atomics.load(this.#fields, BEGUN)
    return begun === Atomics.load(this.#fields, ENDED) ? null : begun
  }

  /** Requests of the step under way, as int32. */
  get ids (): number[] {
    return [...this.#fields.subarray(IDS, IDS + this.#fields[COUNT]!)]
  }
}
