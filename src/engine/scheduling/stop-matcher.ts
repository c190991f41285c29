/** The text that may be shown after a piece, and the stop string that ended it, if one did. */
export interface StopOutcome {
  text: string
  matched: string | null
}

interface Tables {
  texts: readonly string[]
  failures: readonly Int32Array[]
}

const SHOWN = '+'
const HIDDEN = '-'
/**
 * Tables for each list of stop strings: a table is four times as large as its text, and a request may have thousands of
 * samples.
 */
const TABLES = new WeakMap<readonly string[], Tables>()

/**
 * Finds stop strings in text that comes in pieces, and holds back text that may become one. The stop string that is
 * complete first ends the text (among several that end at the same character, the longest). The result does not depend
 * on how the text was cut into pieces. Linear in the text for each stop string (Knuth, Morris, Pratt).
 */
export class StopMatcher {
  readonly #stops: readonly string[]
  readonly #failures: readonly Int32Array[]
  readonly #states: Int32Array
  readonly #keepStop: boolean
  #held = ''
  /** One character for each of `#held`: whether it is shown. */
  #shown = ''

  /**
   * `keepStop` leaves the stop string in the text. All samples of a request pass the same list and share its tables.
   */
  constructor (stops: readonly string[], keepStop: boolean) {
    const { texts, failures } = tablesOf(stops)
    this.#stops = texts
    this.#failures = failures
    this.#states = new Int32Array(texts.length)
    this.#keepStop = keepStop
  }

  /**
   * With `obey` false, a stop string that is complete within this piece counts as plain text. A piece with `shown`
   * false can end the text but is not part of it.
   */
  push (piece: string, obey = true, shown = true): StopOutcome {
    if (this.#stops.length === 0) return { text: shown ? piece : '', matched: null }
    const text = this.#held + piece
    const mask = this.#shown + (shown ? SHOWN : HIDDEN).repeat(piece.length)
    for (let at = this.#held.length; at < text.length; at++) {
      const matched = this.#advance(text.charCodeAt(at))
      if (matched === null || !obey) continue
      this.#held = this.#shown = ''
      return { text: visible(text, mask, at + 1 - (this.#keepStop ? 0 : matched.length)), matched }
    }
    const done = text.length - Math.max(...this.#states)
    this.#held = text.slice(done)
    this.#shown = mask.slice(done)
    return { text: visible(text, mask, done), matched: null }
  }

  /** The text that was held back and contains no stop string. Matching begins anew. */
  flush (): string {
    const held = visible(this.#held, this.#shown, this.#held.length)
    this.#held = this.#shown = ''
    this.#states.fill(0)
    return held
  }

  #advance (unit: number): string | null {
    let matched: string | null = null
    for (let i = 0; i < this.#stops.length; i++) {
      const stop = this.#stops[i]!
      let state = this.#states[i]!
      while (state > 0 && stop.charCodeAt(state) !== unit) state = this.#failures[i]![state - 1]!
      if (stop.charCodeAt(state) === unit) state++
      if (state === stop.length) {
        if (matched === null || stop.length > matched.length) matched = stop
        state = this.#failures[i]![state - 1]!
      }
      this.#states[i] = state
    }
    return matched
  }
}

/** The shown part of the first `end` characters. */
function visible (text: string, mask: string, end: number): string {
  const part = text.slice(0, end)
  return mask.lastIndexOf(HIDDEN, end - 1) < 0
    ? part
    : Array.from({ length: end }, (_, i) => mask[i] === SHOWN ? part[i]! : '').join('')
}

function tablesOf (stops: readonly string[]): Tables {
  let tables = TABLES.get(stops)
  if (tables === undefined) {
    const texts = stops.filter((stop) => stop !== '')
    tables = { texts, failures: texts.map(failureTable) }
    TABLES.set(stops, tables)
  }
  return tables
}

/** For each prefix, the length of its longest proper suffix that is a prefix too. */
function failureTable (stop: string): Int32Array {
  const table = new Int32Array(stop.length)
  for (let i = 1, length = 0; i < stop.length; i++) {
    while (length > 0 && stop[i] !== stop[length]) length = table[length - 1]!
    if (stop[i] === stop[length]) length++
    table[i] = length
  }
  return table
}
