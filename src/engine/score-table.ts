import type { InputLogprobs, Rows, Scored } from '../contract/rollout-engine.ts'
import { doubleList, intList } from './growable.ts'

// Scores in columns: 12 bytes each, where an array of two numbers takes 80. A request may have millions of them.

/** The columns of a table; they survive a structured clone. */
export interface Columns {
  ids: Int32Array
  logprobs: Float64Array
  /** Number of scores up to the end of each row; absent if each row is one score. */
  ends?: Int32Array
}

/** A list of scores; a score that does not exist (of a prompt's first token) has a logprob of null. */
export class ScoreList<T extends number | null = number> implements Rows<[logprob: T, id: number]> {
  readonly #ids = intList()
  readonly #logprobs = doubleList()

  static from<T extends number | null> ({ ids, logprobs }: Columns): ScoreList<T> {
    const list = new ScoreList<T>()
    list.#ids.append(ids, 0, ids.length)
    list.#logprobs.append(logprobs, 0, logprobs.length)
    return list
  }

  get length (): number {
    return this.#ids.length
  }

  push ([logprob, id]: readonly [logprob: T, id: number]): void {
    this.#ids.push(id)
    this.#logprobs.push(logprob ?? NaN)
  }

  at (index: number): [logprob: T, id: number] {
    const logprob = this.#logprobs.data[index]!
    return [(Number.isNaN(logprob) ? null : logprob) as T, this.#ids.data[index]!]
  }

  map<R> (change: (score: [logprob: T, id: number], index: number) => R): R[] {
    return Array.from({ length: this.length }, (_, i) => change(this.at(i), i))
  }

  *[Symbol.iterator] (): Generator<[logprob: T, id: number], void, undefined> {
    for (let i = 0; i < this.length; i++) yield this.at(i)
  }

  columns (): Columns {
    return { ids: this.#ids.view().slice(), logprobs: this.#logprobs.view().slice() }
  }

  toJSON (): unknown[] {
    return [...this]
  }
}

/** Rows of scores; null for a row that does not exist. */
export class ScoreTable<T extends Scored[] | null = Scored[]> implements Rows<T> {
  readonly #scores: ScoreList
  /** The end of each row among the scores; -1 - end for null. */
  readonly #ends = intList()

  static from<T extends Scored[] | null> ({ ends, ...columns }: Columns): ScoreTable<T> {
    const table = new ScoreTable<T>(ScoreList.from(columns))
    table.#ends.append(ends!, 0, ends!.length)
    return table
  }

  constructor (scores = new ScoreList()) {
    this.#scores = scores
  }

  get length (): number {
    return this.#ends.length
  }

  push (row: readonly Scored[] | null): void {
    for (const score of row ?? []) this.#scores.push(score)
    this.#ends.push(row === null ? -1 - this.#scores.length : this.#scores.length)
  }

  at (index: number): T {
    const end = this.#ends.data[index]!
    if (end < 0) return null as T
    const before = index === 0 ? 0 : this.#ends.data[index - 1]!
    const begin = before < 0 ? -1 - before : before
    return Array.from({ length: end - begin }, (_, i) => this.#scores.at(begin + i)) as T
  }

  map<R> (change: (row: T, index: number) => R): R[] {
    return Array.from({ length: this.length }, (_, i) => change(this.at(i), i))
  }

  *[Symbol.iterator] (): Generator<T, void, undefined> {
    for (let i = 0; i < this.length; i++) yield this.at(i)
  }

  columns (): Columns {
    return { ...this.#scores.columns(), ends: this.#ends.view().slice() }
  }

  toJSON (): unknown[] {
    return [...this]
  }
}

/** Scores of a prompt while they are computed. */
export interface InputTables extends InputLogprobs {
  logprobs: ScoreList<number | null>
  top: ScoreTable<Scored[] | null>
  ids: ScoreTable<Scored[] | null>
}

export function inputTables (): InputTables {
  return { logprobs: new ScoreList(), top: new ScoreTable(), ids: new ScoreTable() }
}

/** The scores of a prompt in a message. */
export type PackedInput = Record<keyof InputLogprobs, Columns>

export function packInput ({ logprobs, top, ids }: InputTables): PackedInput {
  return { logprobs: logprobs.columns(), top: top.columns(), ids: ids.columns() }
}

export function unpackInput ({ logprobs, top, ids }: PackedInput): InputTables {
  return { logprobs: ScoreList.from(logprobs), top: ScoreTable.from(top), ids: ScoreTable.from(ids) }
}
