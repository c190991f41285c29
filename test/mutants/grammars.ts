import type { Mutant } from './mutant.ts'

export const grammars: readonly Mutant[] = [
  {
    why: 'bytes of one class are told apart by their first border only',
    file: 'src/grammars/automaton.ts',
    before: 'borders[first] = borders[last + 1] = 1',
    after: 'borders[first] = 1',
    tests: ['test/grammars/regex.test.ts', 'test/grammars/masks.test.ts']
  },
  {
    why: 'a rule that ends returns to the start',
    file: 'src/grammars/automaton.ts',
    before: `if (parent === null) canEnd = true
      else seen.add(parent)`,
    after: 'if (parent === null) canEnd = true',
    tests: ['test/grammars/ebnf.test.ts', 'test/grammars/schema.test.ts']
  },
  {
    why: 'a text may end inside a rule',
    file: 'src/grammars/automaton.ts',
    before: `if (parent === null) canEnd = true
      else seen.add(parent)`,
    after: `canEnd = true
      if (parent !== null) seen.add(parent)`,
    tests: ['test/grammars/ebnf.test.ts', 'test/grammars/schema.test.ts', 'test/grammars/masks.test.ts']
  },
  {
    why: 'tokens below a refused node are visited',
    file: 'src/grammars/compiled-grammar.ts',
    before: `        node = skip[node]!
        continue`,
    after: `        node++
        continue`,
    tests: ['test/grammars/masks.test.ts']
  },
  {
    why: 'the end of text is allowed everywhere',
    file: 'src/grammars/compiled-grammar.ts',
    before: 'else mask[id >>> 5]! &= ~(1 << (id & 31))',
    after: 'else mask[id >>> 5]! |= 1 << (id & 31)',
    tests: ['test/grammars/masks.test.ts']
  },
  {
    why: 'special tokens may spell text',
    file: 'src/grammars/compiled-grammar.ts',
    before: `    for (const id of this.#hidden) mask[id >>> 5]! &= ~(1 << (id & 31))
`,
    after: '',
    tests: ['test/grammars/masks.test.ts']
  },
  {
    why: 'a subtree ends one node too early',
    file: 'src/grammars/token-trie.ts',
    before: 'for (const above of open.splice(level - 1)) skip[above] = node',
    after: 'for (const above of open.splice(level)) skip[above] = node',
    tests: ['test/grammars/masks.test.ts']
  },
  {
    why: 'text behind the end of reasoning in one token is lost',
    file: 'src/grammars/grammar-matcher.ts',
    before: 'this.#at = this.#grammar.automaton.read(tail.subarray(found + begin.text.length), start) ?? start',
    after: 'this.#at = start',
    tests: ['test/grammars/matcher.test.ts']
  },
  {
    why: 'an end of text in the middle is accepted',
    file: 'src/grammars/grammar-matcher.ts',
    before: `      this.#ended = this.#at.canEnd
      return this.#ended`,
    after: `      this.#ended = true
      return this.#ended`,
    tests: ['test/grammars/matcher.test.ts']
  },
  {
    why: 'both bounds of an integer exclude themselves',
    file: 'src/grammars/schema/numbers.ts',
    before: 'low.excluded ? Math.floor(low.value) + 1 : Math.ceil(low.value))',
    after: 'Math.floor(low.value) + 1)',
    tests: ['test/grammars/schema.test.ts']
  },
  {
    why: 'a number that has more digits than the lower bound is refused',
    file: 'src/grammars/schema/numbers.ts',
    before: 'digits <= String(last).length; digits++',
    after: 'digits <= String(first).length; digits++',
    tests: ['test/grammars/schema.test.ts']
  },
  {
    why: 'a string may be one character longer than maxLength',
    file: 'src/grammars/schema/strings.ts',
    before: 'repeat(rule(CHARACTER), min, max)',
    after: 'repeat(rule(CHARACTER), min, max + 1)',
    tests: ['test/grammars/schema.test.ts']
  },
  {
    why: 'ranges of characters across lengths of UTF-8 lose their end',
    file: 'src/grammars/utf8-ranges.ts',
    before: `[...utf8Ranges(first, end), ...utf8Ranges(end + 1, last)]
  }`,
    after: `[...utf8Ranges(first, end)]
  }`,
    tests: ['test/grammars/regex.test.ts']
  },
  {
    why: 'a negated class contains its own characters',
    file: 'src/grammars/regex.ts',
    before: 'return negate ? complement(ranges) : normalized(ranges)',
    after: 'return normalized(ranges)',
    tests: ['test/grammars/regex.test.ts']
  },
  {
    why: 'allowed tokens and a grammar allow the union of both',
    file: 'src/engine/sequences/token-constraint.ts',
    before: 'return a.map((word, i) => word & b[i]!)',
    after: 'return a.map((word, i) => word | b[i]!)',
    tests: ['test/engine/constraints.test.ts']
  }
]
