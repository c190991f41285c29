import { RefitError } from '../errors.ts'
import { exponential, integer } from './random.ts'
import type { Random } from './random.ts'

/** How many tokens prompts or outputs have. */
export type Lengths =
  | { kind: 'fixed', tokens: number }
  | { kind: 'uniform', least: number, most: number }
  /** Draws beyond `most` become `most`, which lowers the mean. */
  | { kind: 'exponential', mean: number, most: number }

const MOST = 10_000_000
/** Times the mean: fewer than one draw in 2900 is longer. */
const TAIL = 8

export const LENGTHS_HELP = '512, uniform:100-900, exponential:512 or exponential:512-4096 (mean and most)'

/** Reads a length of the command line. */
export function parseLengths (text: string, flag: string): Lengths {
  const fixed = /^(?:fixed:)?(\d+)$/.exec(text)
  if (fixed !== null) return { kind: 'fixed', tokens: count(fixed[1]!) }
  const uniform = /^uniform:(\d+)-(\d+)$/.exec(text)
  if (uniform !== null) {
    const [least, most] = [count(uniform[1]!), count(uniform[2]!)]
    if (least <= most) return { kind: 'uniform', least, most }
  }
  const spread = /^exponential:(\d+)(?:-(\d+))?$/.exec(text)
  if (spread !== null) {
    const mean = count(spread[1]!)
    const most = spread[2] === undefined ? mean * TAIL : count(spread[2])
    if (most >= mean) return { kind: 'exponential', mean, most }
  }
  throw wrong()

  function count (digits: string): number {
    const tokens = Number(digits)
    if (tokens < 1 || tokens > MOST) throw wrong()
    return tokens
  }

  function wrong (): RefitError {
    return new RefitError('CONFIG', `bench: ${flag}: expected ${LENGTHS_HELP}, got ${JSON.stringify(text)}`, {
      param: flag
    })
  }
}

export function drawLength (lengths: Lengths, random: Random): number {
  switch (lengths.kind) {
    case 'fixed':
      return lengths.tokens
    case 'uniform':
      return integer(random, lengths.least, lengths.most)
    case 'exponential':
      return Math.min(lengths.most, Math.max(1, Math.round(exponential(random, lengths.mean))))
  }
}
