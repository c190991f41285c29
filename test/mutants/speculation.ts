import type { Mutant } from './mutant.ts'

const RANDOM = ['test/engine/scheduler-random.test.ts']

export const speculation: readonly Mutant[] = [
  {
    why: 'tokens after a wrong guess are kept',
    file: 'src/engine/scheduling/step-results.ts',
    before: 'last.tokens[0] === draft[events.length - 1])',
    after: 'draft.length >= events.length)',
    tests: RANDOM
  },
  {
    why: 'an output goes on after its end if the guess was right',
    file: 'src/engine/scheduling/step-results.ts',
    before: '(broken === null && last.finish === null && ',
    after: '(broken === null && ',
    tests: RANDOM
  },
  {
    why: 'rows of wrong guesses are read as those of the next request',
    file: 'src/engine/scheduling/step-results.ts',
    before: `        this.#skipRows(seq)
        break
`,
    after: `        while (this.#step.rowSequences[this.#row] === seq) this.#row++
        break
`,
    tests: ['test/speculation/engine.test.ts', ...RANDOM]
  },
  {
    why: 'the KV of wrong guesses is kept',
    file: 'src/engine/scheduling/batcher.ts',
    before: `      seq.computed -= drafted - accepted
`,
    after: '',
    tests: RANDOM
  },
  {
    why: 'guesses may go beyond the longest output',
    file: 'src/engine/scheduling/fill-step.ts',
    before: 'Math.min(pages * kv.pageSize, seq.maxLength - 1)',
    after: 'Math.min(pages * kv.pageSize, seq.maxLength + 8)',
    tests: ['test/speculation/scheduler.test.ts']
  },
  {
    why: 'a step is planned behind one with guesses',
    file: 'src/engine/sequences/sequence.ts',
    before: 'this.begunSamples <= 1 && (',
    after: '(',
    tests: RANDOM
  },
  {
    why: 'end tokens are banned by the length before the guesses',
    file: 'src/engine/scheduling/step-builder.ts',
    before: 'nextCompletion + i, constraint',
    after: 'nextCompletion, constraint',
    tests: RANDOM
  },
  {
    why: 'guesses take the pages that the prefix cache holds',
    file: 'src/engine/scheduling/fill-step.ts',
    before: 'Math.floor(kv.allocator.free / decodes.length)',
    after: 'Math.floor(kv.available / decodes.length)',
    tests: ['test/speculation/scheduler.test.ts']
  },
  {
    why: 'pages of wrong guesses stay with their request',
    file: 'src/engine/scheduling/batcher.ts',
    before: `      if (drafted > accepted) this.kv.trim(seq)
`,
    after: '',
    tests: ['test/speculation/scheduler.test.ts']
  },
  {
    why: 'callers with other cache salts share texts',
    file: 'src/engine/speculation/drafter.ts',
    before: 'JSON.stringify([inputIds.length, a, b, adapter, cacheSalt])',
    after: 'JSON.stringify([inputIds.length, a, b, adapter, cacheSalt.length > 99])',
    tests: ['test/speculation/drafter.test.ts']
  },
  {
    why: 'kept outputs are never forgotten',
    file: 'src/engine/speculation/drafter.ts',
    before: '    this.#keptTokens += texts.size - before\n',
    after: '',
    tests: ['test/speculation/drafter.test.ts']
  },
  {
    why: 'places of a text are lost when the table of an index grows',
    file: 'src/engine/speculation/text-index.ts',
    before: 'for (let place = 0; place < this.#places - 1; place++) {',
    after: 'for (let place = 8; place < this.#places - 1; place++) {',
    tests: ['test/speculation/text-index.test.ts']
  },
  {
    why: 'steps with guesses count as others',
    file: 'src/engine/speculation/step-cost.ts',
    before: 'isGuessing ? [this.#guessing, this.#plain] : [this.#plain, this.#guessing]',
    after: '[this.#plain, this.#guessing]',
    tests: ['test/speculation/step-cost.test.ts']
  },
  {
    why: 'guesses that are not worth their time are computed',
    file: 'src/engine/speculation/drafter.ts',
    before: 'taken.length === 0 || !this.#cost.isWorth(sequences.length, taken.length, right)',
    after: 'taken.length === 0',
    tests: ['test/speculation/drafter.test.ts']
  },
  {
    why: 'all guesses of a request have the mask of its last token',
    file: 'src/engine/scheduling/step-builder.ts',
    before: '      if (i > 0) constraint?.accept(draft[i - 1]!)\n',
    after: '',
    tests: ['test/engine/constraints.test.ts']
  },
  {
    why: 'a guess after which no token is allowed is computed',
    file: 'src/engine/sequences/token-constraint.ts',
    before: ' || ahead.isStuck',
    after: '',
    tests: ['test/engine/constraints.test.ts']
  },
  {
    why: 'bad words are looked for before the guesses',
    file: 'src/engine/sequences/sequence.ts',
    before: 'const first = this.length + guesses - word.length + 1',
    after: 'const first = this.length - word.length + 1',
    tests: ['test/engine/constraints.test.ts']
  },
  {
    why: 'guesses as likely as the first that has no room are dropped',
    file: 'src/engine/speculation/drafter.ts',
    before: '.slice(0, left)',
    after: '.filter(({ chance }, _, list) => chance > list[left]!.chance)',
    tests: ['test/speculation/drafter.test.ts']
  },
  {
    why: 'the time of steps without guesses is never looked at again',
    file: 'src/engine/speculation/step-cost.ts',
    before: 'if (this.#plain.probes > 0) return false',
    after: '',
    tests: ['test/speculation/step-cost.test.ts']
  },
  {
    why: 'a step that waited for guesses in vain counts as one without',
    file: 'src/engine/speculation/drafter.ts',
    before: 'const isVain = this.#waited && !isGuessing',
    after: 'const isVain = false',
    tests: ['test/speculation/drafter.test.ts']
  },
  {
    why: 'a rest counts as the time of the next step',
    file: 'src/engine/scheduling/steps-under-way.ts',
    before: 'this.#from = null',
    after: '',
    tests: ['test/engine/steps-under-way.test.ts']
  },
  {
    why: 'steps that load kernels count',
    file: 'src/engine/speculation/step-cost.ts',
    before: 'return before >= FIRST_STEPS',
    after: 'return true',
    tests: ['test/speculation/step-cost.test.ts']
  },
  {
    why: 'one slow step ends guessing for long',
    file: 'src/engine/speculation/step-cost.ts',
    before: 'Math.min(ms, MOST_TIMES * Math.max(expected, kind.ms))',
    after: 'ms',
    tests: ['test/speculation/step-cost.test.ts']
  }
]
