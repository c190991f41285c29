import { CallJoiner } from './call-joiner.ts'

/**
 * Joins identical calls of kinds that undo each other (release and resume). A call does not join one that is older than
 * a call of another kind, because that call will undo it.
 */
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
