import { CallJoiner } from './call-joiner.ts'

/** Joins identical calls of kinds that undo each other: none joins one from before a call of another kind, which will undo that one. */
export class InverseCallJoiner<T> {
  readonly #calls = new CallJoiner<T>()
  #kind = ''
  #turn = 0

  join (kind: string, key: string, run: () => Promise<T>): Promise<T> {
    if (kind !== this.#kind) this.#turn++
    this.#kind = kind
    return this.#calls.join(`${this.#turn} ${key}`, run)
  }
}
