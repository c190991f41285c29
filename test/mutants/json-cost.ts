import type { Mutant } from './mutant.ts'

export const jsonCost: readonly Mutant[] = [
  {
    why: 'strings cost nothing to parse',
    file: 'src/http/json-cost.ts',
    before: 'this.strings * POINTS.string + ',
    after: '',
    tests: ['test/http/json-cost.test.ts']
  },
  {
    why: 'admin keys do not raise the limit of values',
    file: 'src/http/json-cost.ts',
    before: `(auth === 'normal' ? 5 : 2)`,
    after: '5',
    tests: ['test/http/json-cost.test.ts']
  },
  {
    why: 'names of different objects are taken for the same',
    file: 'src/http/json-cost.ts',
    before: 'Math.imul(hash ^ this.#bytes[at]!, 0x01000193)',
    after: 'Math.imul(hash ^ 1, 0x01000193)',
    tests: ['test/http/json-cost.test.ts']
  },
  {
    why: 'an escaped quote ends a string',
    file: 'src/http/json-cost.ts',
    before: `      if (bytes[at] === BACKSLASH) {
        isEscaped = true
        at += 2
      } else if`,
    after: `      if (bytes[at] === BACKSLASH) {
        isEscaped = true
        at++
      } else if`,
    tests: ['test/http/json-cost.test.ts']
  },
  {
    why: 'a list that closes stays open',
    file: 'src/http/json-cost.ts',
    before: `        case CLOSE_BRACKET:
          this.#open.pop()
          break`,
    after: `        case CLOSE_BRACKET:
          break`,
    tests: ['test/http/json-cost.test.ts']
  },
  {
    why: 'a long body is counted in one turn',
    file: 'src/http/json-cost.ts',
    before: `    if (!hasTime()) await nextTurn()
  }
  if (cost.points > most)`,
    after: `  }
  if (cost.points > most)`,
    tests: ['test/http/json-cost.test.ts']
  },
  {
    why: 'values beyond the last step are free',
    file: 'src/http/json-cost.ts',
    before: `  if (cost.points > most) throw tooMany(cost, most)
  return`,
    after: '  return',
    tests: ['test/http/json-cost.test.ts']
  }
]
