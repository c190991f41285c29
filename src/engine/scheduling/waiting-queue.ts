import type { Sequence } from '../sequences/sequence.ts'

/**
 * Sequences that wait, in order of arrival. New ones join at the end; retracted ones find their place from the front.
 * Parked ones wait for another's prefill outside of that order, and return to their place.
 */
export class WaitingQueue {
  first: Sequence | null = null
  /** Sequences that wait in order. */
  queued = 0
  /** Waiting sequences that have run before (retracted). */
  started = 0
  #last: Sequence | null = null
  #parked = 0

  /** All that wait. */
  get size (): number {
    return this.queued + this.#parked
  }

  add (seq: Sequence): void {
    seq.state = 'queued'
    if (seq.started) this.started++
    this.#insert(seq)
  }

  park (seq: Sequence): void {
    this.#remove(seq)
    seq.state = 'parked'
    this.#parked++
  }

  /** In order of arrival; from the last to the first, so that each finds its place at the front. */
  unpark (sequences: readonly Sequence[]): void {
    for (const seq of [...sequences].reverse()) {
      seq.state = 'queued'
      this.#parked--
      this.#insert(seq)
    }
  }

  /** A sequence, queued or parked, waits no longer. */
  remove (seq: Sequence): void {
    if (seq.started) this.started--
    if (seq.state === 'parked') this.#parked--
    else this.#remove(seq)
  }

  /** Throws if the order or the states are wrong. For tests. */
  check (): void {
    let queued = 0
    for (let seq = this.first; seq !== null; seq = seq.next, queued++) {
      if (seq.state !== 'queued' || seq.pageCount > 0) throw new Error('a waiting sequence is not as it should be')
      if (seq.next !== null && seq.next.arrival < seq.arrival) throw new Error('the queue is out of order')
    }
    if (queued !== this.queued) throw new Error(`${queued} sequences are in the queue, which counts ${this.queued}`)
  }

  #insert (seq: Sequence): void {
    let before = this.#last
    if (before !== null && before.arrival > seq.arrival) {
      let after = this.first!
      while (after.arrival < seq.arrival) after = after.next!
      before = after.previous
    }
    seq.previous = before
    seq.next = before === null ? this.first : before.next
    if (before === null) this.first = seq
    else before.next = seq
    if (seq.next === null) this.#last = seq
    else seq.next.previous = seq
    this.queued++
  }

  #remove (seq: Sequence): void {
    if (seq.previous === null) this.first = seq.next
    else seq.previous.next = seq.next
    if (seq.next === null) this.#last = seq.previous
    else seq.next.previous = seq.previous
    seq.previous = seq.next = null
    this.queued--
  }
}
