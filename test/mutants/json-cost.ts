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
    before: `          this.#flat = -1
          this.#open.pop()
          break`,
    after: `          this.#flat = -1
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
  },
  {
    why: 'a list with strings in it is cut at the commas of the strings',
    file: 'src/http/json-cost.ts',
    before: `          at = this.#skipString(at)
          this.#flat = -1`,
    after: '          at = this.#skipString(at)',
    tests: ['test/http/cut-lists.test.ts']
  },
  {
    why: 'a comma behind the last value of a long list is accepted',
    file: 'src/http/cut-lists.ts',
    before: 'if (part.length === 0) return undefined',
    after: 'if (part.length > PART_BYTES) return undefined',
    tests: ['test/http/cut-lists.test.ts']
  },
  {
    why: 'a long list in the place of a name becomes a name',
    file: 'src/http/cut-lists.ts',
    before: 'isName(bytes, list) ? undefined : await',
    after: 'await',
    tests: ['test/http/cut-lists.test.ts']
  },
  {
    why: 'the first value of each part of a long list is lost',
    file: 'src/http/cut-lists.ts',
    before: 'from = to + 1',
    after: 'from = to + 3',
    tests: ['test/http/cut-lists.test.ts']
  },
  {
    why: 'an index of a hundred thousand files is sorted before it is refused',
    file: 'src/wire/safetensors/index.ts',
    before: 'if (names.size === MAX_FILES)',
    after: 'if (names.size === MAX_FILES * 100)',
    tests: ['test/wire/safetensors/index.test.ts']
  }
]
