/** Code points from the first to the last, both included. */
export type Range = readonly [first: number, last: number]

/** A language of texts. All kinds of grammars become expressions. */
export type Expression =
  | { type: 'text', text: string }
  /** One character out of a set. */
  | { type: 'chars', ranges: readonly Range[] }
  | { type: 'sequence', parts: readonly Expression[] }
  | { type: 'choice', options: readonly Expression[] }
  /** `max` may be Infinity. */
  | { type: 'repeat', of: Expression, min: number, max: number }
  | { type: 'rule', name: string }
  /** Any text up to the first of these ends, and what follows that end. `open`: or any text without an end. */
  | { type: 'until', ends: readonly { text: string, then: Expression }[], open: boolean }

export interface Rules {
  root: Expression
  rules: ReadonlyMap<string, Expression>
}

export const MAX_CODE_POINT = 0x10ffff
export const ANY: Expression = { type: 'chars', ranges: [[0, MAX_CODE_POINT]] }
export const EMPTY: Expression = { type: 'text', text: '' }

export function text (text: string): Expression {
  return { type: 'text', text }
}

export function chars (...ranges: (Range | string)[]): Expression {
  return {
    type: 'chars',
    ranges: ranges.map(range => typeof range === 'string' ? [range.codePointAt(0)!, range.codePointAt(0)!] : range)
  }
}

export function sequence (...parts: (Expression | string)[]): Expression {
  return { type: 'sequence', parts: parts.map(part => typeof part === 'string' ? text(part) : part) }
}

export function choice (...options: (Expression | string)[]): Expression {
  return { type: 'choice', options: options.map(option => typeof option === 'string' ? text(option) : option) }
}

export function repeat (of: Expression, min: number, max: number): Expression {
  return { type: 'repeat', of, min, max }
}

export function optional (of: Expression): Expression {
  return repeat(of, 0, 1)
}

export function rule (name: string): Expression {
  return { type: 'rule', name }
}

/** Sorted ranges that neither overlap nor touch. */
export function normalized (ranges: readonly Range[]): Range[] {
  const sorted = [...ranges].sort((a, b) => a[0] - b[0])
  const out: [number, number][] = []
  for (const [first, last] of sorted) {
    const before = out.at(-1)
    if (before !== undefined && first <= before[1] + 1) before[1] = Math.max(before[1], last)
    else out.push([first, last])
  }
  return out
}

/** All other characters. */
export function complement (ranges: readonly Range[]): Range[] {
  const out: Range[] = []
  let next = 0
  for (const [first, last] of normalized(ranges)) {
    if (first > next) out.push([next, first - 1])
    next = last + 1
  }
  if (next <= MAX_CODE_POINT) out.push([next, MAX_CODE_POINT])
  return out
}
