import type { Mutant } from './mutant.ts'

const TESTS = ['test/weights/shadow.test.ts']
const TRANSACTIONS = ['test/weights/shadow-transactions.test.ts']
const OLD = ['test/engine/scheduler-finish-old.test.ts']
const SWAPS = ['test/engine/scheduler-swap.test.ts']

export const shadow: readonly Mutant[] = [
  {
    why: 'a step that fails on old weights ends the requests of a step on the new ones',
    file: 'src/engine/scheduling/batcher.ts',
    before: 'if (this.steps.count === 0 || this.steps.next!.weights !== ended.step.weights) return',
    after: 'if (this.steps.count === 0) return',
    tests: ['test/engine/scheduler-failed-step.test.ts', 'test/weights/finish-old-failed-step.test.ts']
  },
  {
    why: 'tensors that an update left out are not caught up',
    file: 'src/weights/shadow-set.ts',
    before: 'await addon.copyWeights(core, rects, ledger.set, this.set).catch(',
    after: 'await Promise.resolve().catch(',
    tests: TESTS
  },
  {
    why: 'bytes of an update that was given up count as those in use',
    file: 'src/weights/shadow-set.ts',
    before: 'for (const name of names) this.#heldAt.delete(name)',
    after: 'for (const name of [] as string[]) this.#heldAt.delete(name)',
    tests: TESTS
  },
  {
    why: 'memory that was released counts as what it held',
    file: 'src/weights/shadow-set.ts',
    before: '    this.#heldAt.clear()\n',
    after: '',
    tests: TESTS
  },
  {
    why: 'an update with a shadow writes the weights in use',
    file: 'src/weights/update.ts',
    before: 'return shadow?.access ?? { set: ledger.set }',
    after: 'return { set: ledger.set }',
    tests: TESTS
  },
  {
    why: 'an update writes a set that a read from before the swap still reads',
    file: 'src/weights/shadow-set.ts',
    before: `    await this.#read
    if (this.#state`,
    after: '    if (this.#state',
    tests: TESTS
  },
  {
    why: 'an aborted transaction tears the weights in use, which it has not written',
    file: 'src/weights/transaction.ts',
    before: 'if (written.size > 0 && !isWhole && !isShadowed) {',
    after: 'if (written.size > 0 && !isWhole) {',
    tests: TRANSACTIONS
  },
  {
    why: 'a change of elements follows a write of its tensor that broke off',
    file: 'src/weights/update.ts',
    before: 'if (this.#written.delete(name)) this.#lost.add(name)',
    after: 'this.#written.delete(name)',
    tests: TRANSACTIONS
  },
  {
    why: 'a change of elements is relative to weights before those in use',
    file: 'src/weights/update.ts',
    before: '    if (isPatch) await shadow.catchUp(names, this.#written)\n',
    after: '',
    tests: TRANSACTIONS
  },
  {
    why: 'the step under way loses its weights to a swap',
    file: 'src/engine/scheduling/scheduler.ts',
    before: `    if (!keepOld) this.#batcher.land()
    if (abort) this.abortAll()
`,
    after: `    if (abort) this.abortAll()
`,
    tests: SWAPS
  },
  {
    why: 'steps after a swap compute with the set before it',
    file: 'src/engine/scheduling/batcher.ts',
    before: '    this.#weights.use(weights, keepOld)\n',
    after: '    this.#weights.use({ ...weights, set: 0 }, keepOld)\n',
    tests: SWAPS
  },
  {
    why: 'a request finds pages of the prefix cache that other weights have computed',
    file: 'src/engine/memory/kv-memory.ts',
    before: '  return epochKey(weights?.epoch ?? 0) + cacheKey\n',
    after: '  return epochKey(0 * (weights?.epoch ?? 0)) + cacheKey\n',
    tests: OLD
  },
  {
    why: 'requests on old weights run first, and new ones wait for them',
    file: 'src/engine/scheduling/weights-in-use.ts',
    before: 'return this.#lastStep === this.#old ? [this.#current, this.#old] : [this.#old, this.#current]',
    after: 'return [this.#old, this.#current]',
    tests: OLD
  },
  {
    why: 'requests change their weights while a step under way computes with the old ones',
    file: 'src/engine/scheduling/batcher.ts',
    before: '    if (this.onOldWeights > 0) this.land()\n',
    after: '',
    tests: OLD
  },
  {
    why: 'an update writes the set that requests still finish on',
    file: 'src/weights/shadow-set.ts',
    before: '    if (this.#old !== null) await endedWithin(this.#old.ended, deadlineMs, signal)\n',
    after: '',
    tests: ['test/weights/finish-old.test.ts']
  },
  {
    why: 'a long write beside steps is one job',
    file: 'src/weights/sliced-write.ts',
    before: 'if (ranges.length <= 1 ||',
    after: 'if (ranges.length >= 0 ||',
    tests: ['test/weights/sliced-write.test.ts', 'test/adapters/between-slices.test.ts']
  },
  {
    why: 'each slice of a write opens the segments that it reads',
    file: 'src/weights/sliced-write.ts',
    before: "if (!('segment' in source) || source.segment.keep !== undefined)",
    after: "if (!('segment' in source) || name !== '')",
    tests: ['test/weights/sliced-segments.test.ts', 'test/weights/sliced-write.test.ts']
  },
  {
    why: 'a tensor counts as written when some of its rows are',
    file: 'src/weights/sliced-write.ts',
    before: 'ends[index] === 1 && isBroken[owner] === 0',
    after: 'isBroken[owner] === 0',
    tests: ['test/weights/sliced-write.test.ts']
  },
  {
    why: 'a copy to the second set that fails reaches clients in native words',
    file: 'src/weights/shadow-set.ts',
    before: 'if (error instanceof RefitError) throw error\n          throw catchUpFailed',
    after: 'if (error instanceof Error) throw error\n          throw catchUpFailed',
    tests: ['test/weights/shadow.test.ts', 'test/weights/shadow-http.test.ts']
  }
]
