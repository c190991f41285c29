import { integer, randomFrom } from './random.ts'

// Common words that most vocabularies have as one token, with the space before them.
const WORDS = ('the of and to in is that for it as was with be by on not he his but at are this have from or had an ' +
  'they which one you were her all she there would their we him been has when who will more no if out so said what ' +
  'up its about into than them can only other new some could time these two may then do first any my now such like ' +
  'our over')
  .split(' ')

/** The range of token ids that prompts are made of. */
export interface IdRange {
  least: number
  most: number
}

/**
 * Ids of a vocabulary of this size. In large ones, ids from 1000 to 9999 are ordinary text in every tokenizer in use;
 * special tokens are at the very beginning or the end.
 */
export function usualIds (vocabulary: number | null): IdRange {
  if (vocabulary === null || vocabulary >= 10_000) return { least: 1000, most: 9999 }
  return { least: 0, most: Math.min(vocabulary, 256) - 1 }
}

/** `length` random ids; the first `shared` ones are those of all prompts with this seed. */
export function promptIds (seed: number, index: number, length: number, shared: number, range: IdRange): number[] {
  const common = randomFrom(seed, -1)
  const own = randomFrom(seed, 16 + index)
  return Array.from({ length }, (_, i) => integer(i < shared ? common : own, range.least, range.most))
}

/** A text of as many words as there are ids. */
export function promptText (ids: readonly number[]): string {
  return ids.map(id => WORDS[id % WORDS.length]!).join(' ')
}
