import type { Expression, Rules } from './expression.ts'
import { refusal } from './refuse.ts'
import { addUntil } from './search.ts'
import { utf8Ranges } from './utf8-ranges.ts'
import type { ByteRange } from './utf8-ranges.ts'

/** Limits the memory of one grammar, and the time of its compilation. */
const MAX_STATES = 1 << 16

export interface State {
  /** Consume one byte out of a range. */
  bytes: { first: number, last: number, to: number }[]
  free: number[]
  /** Continue at `to` after the rule. */
  calls: { rule: number, to: number }[]
}

/**
 * A recursive transition network over bytes: one automaton for each rule, whose edges consume a byte, nothing, or a
 * text of another rule.
 */
export class Network {
  readonly states: State[] = []
  /** Start and end state of each rule; rule 0 is the root. */
  readonly rules: { start: number, end: number }[] = []
  readonly #kind: string
  readonly #names = new Map<string, number>()

  /** `kind`: the kind of grammar, for errors. */
  constructor ({ root, rules }: Rules, kind: string) {
    this.#kind = kind
    this.#declare()
    for (const name of rules.keys()) this.#names.set(name, this.#declare())
    this.add(root, this.rules[0]!.start, this.rules[0]!.end)
    for (const [name, body] of rules) {
      const { start, end } = this.rules[this.#names.get(name)!]!
      this.add(body, start, end)
    }
  }

  state (): number {
    if (this.states.length === MAX_STATES) {
      throw refusal(this.#kind, `the grammar needs more than ${MAX_STATES} states; lower its repetitions and lengths`)
    }
    return this.states.push({ bytes: [], free: [], calls: [] }) - 1
  }

  /** Adds the paths of an expression from one state to another. */
  add (expression: Expression, from: number, to: number): void {
    switch (expression.type) {
      case 'text':
        return this.#chain(Array.from(Buffer.from(expression.text), byte => [byte, byte]), from, to)
      case 'chars':
        return this.#chars(expression.ranges.flatMap(([first, last]) => utf8Ranges(first, last)), from, to)
      case 'sequence': {
        let at = from
        for (const [i, part] of expression.parts.entries()) {
          const next = i === expression.parts.length - 1 ? to : this.state()
          this.add(part, at, next)
          at = next
        }
        if (expression.parts.length === 0) this.states[from]!.free.push(to)
        return
      }
      case 'choice': {
        for (const option of expression.options) this.add(option, from, to)
        return
      }
      case 'repeat':
        return this.#repeat(expression, from, to)
      case 'rule': {
        const rule = this.#names.get(expression.name)
        if (rule === undefined) throw refusal(this.#kind, `the rule ${expression.name} is not defined`)
        this.states[from]!.calls.push({ rule, to })
        return
      }
      case 'until':
        return addUntil(this, expression, from, to)
    }
  }

  #declare (): number {
    return this.rules.push({ start: this.state(), end: this.state() }) - 1
  }

  #chain (ranges: readonly ByteRange[], from: number, to: number): void {
    if (ranges.length === 0) this.states[from]!.free.push(to)
    let at = from
    for (const [i, [first, last]] of ranges.entries()) {
      const next = i === ranges.length - 1 ? to : this.state()
      this.states[at]!.bytes.push({ first, last, to: next })
      at = next
    }
  }

  /** Sequences with the same rest share its states. */
  #chars (sequences: readonly ByteRange[][], from: number, to: number): void {
    const rests = new Map<string, number>([['', to]])
    for (const ranges of sequences) {
      let next = to
      for (let i = ranges.length - 1; i > 0; i--) {
        const key = ranges.slice(i).join()
        let at = rests.get(key)
        if (at === undefined) {
          at = this.state()
          this.states[at]!.bytes.push({ first: ranges[i]![0], last: ranges[i]![1], to: next })
          rests.set(key, at)
        }
        next = at
      }
      this.states[from]!.bytes.push({ first: ranges[0]![0], last: ranges[0]![1], to: next })
    }
  }

  #repeat ({ of, min, max }: Expression & { type: 'repeat' }, from: number, to: number): void {
    let at = from
    for (let i = 0; i < min; i++) {
      const next = this.state()
      this.add(of, at, next)
      at = next
    }
    if (max === Infinity) {
      const loop = this.state()
      this.states[at]!.free.push(loop)
      this.add(of, loop, loop)
      this.states[loop]!.free.push(to)
      return
    }
    for (let i = min; i < max; i++) {
      this.states[at]!.free.push(to)
      const next = this.state()
      this.add(of, at, next)
      at = next
    }
    this.states[at]!.free.push(to)
  }
}
