import type { Sequence } from './sequence.ts'

/**
 * Sequences that wait, in order of arrival. New ones join at the end; retracted ones find their place from the front.
 */
export class WaitingQueue {
  first: Sequence | null = null
  #last: Sequence | null = null
  size = 0

  insert (seq: Sequence): void {
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
    this.size++
  }

  remove (seq: Sequence): void {
    if (seq.previous === null) this.first = seq.next
    else seq.previous.next = seq.next
    if (seq.next === null) this.#last = seq.previous
    else seq.next.previous = seq.previous
    seq.previous = seq.next = null
    this.size--
  }
}
