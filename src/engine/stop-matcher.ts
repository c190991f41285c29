/** What text may be shown after a piece has come, and the stop string that ended it, if one did. */
export interface StopOutcome { text: string, matched: string | null }

/**
 * Finds stop strings in text that comes in pieces, and holds back what may yet become one. The stop that is complete first ends
 * the text (of several that end at the same character the longest), so the outcome does not depend on how the text was cut into pieces. Linear in
 * the text for each stop string (Knuth, Morris, Pratt).
 */
export class StopMatcher {
  readonly #stops: readonly string[]
  readonly #failures: readonly Int32Array[]
  readonly #states: Int32Array
  readonly #keepStop: boolean
  #held = ''

  /** `keepStop` leaves the stop string in the text. */
  constructor (stops: readonly string[], keepStop: boolean) {
    this.#stops = stops.filter((stop) => stop !== '')
    this.#failures = this.#stops.map(failureTable)
    this.#states = new Int32Array(this.#stops.length)
    this.#keepStop = keepStop
  }

  /** With `obey` false, a stop that is complete within this piece is passed over as plain text. */
  push (piece: string, obey = true): StopOutcome {
    if (this.#stops.length === 0) return { text: piece, matched: null }
    const text = this.#held + piece
    for (let at = this.#held.length; at < text.length; at++) {
      const matched = this.#advance(text.charCodeAt(at))
      if (matched === null || !obey) continue
      this.#held = ''
      return { text: text.slice(0, at + 1 - (this.#keepStop ? 0 : matched.length)), matched }
    }
    const shown = text.length - Math.max(...this.#states)
    this.#held = text.slice(shown)
    return { text: text.slice(0, shown), matched: null }
  }

  /** What was held back, where no stop came of it. Matching begins anew. */
  flush (): string {
    const held = this.#held
    this.#held = ''
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
