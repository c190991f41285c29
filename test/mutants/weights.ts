import type { Mutant } from './mutant.ts'

export const weights: readonly Mutant[] = [
  {
    why: 'a label moves before the gate is shut',
    file: 'src/weights/update.ts',
    before: `      if (shadow === null && (flushCache || options.version !== undefined)) await this.#shut()
`,
    after: `      if (options.version !== undefined) ledger.label(options.version)
      if (options.version !== undefined || flushCache) await this.#shut()
`,
    tests: ['test/weights/update.test.ts']
  },
  {
    why: 'the opening of the gate is not awaited',
    file: 'src/weights/update.ts',
    before: 'await this.#gate?.open(ledger.opening(flushCache))',
    after: 'void this.#gate?.open(ledger.opening(flushCache))',
    tests: ['test/weights/update.test.ts']
  },
  {
    why: "an update's deadline never reaches the gate",
    file: 'src/weights/weight-store.ts',
    before: 'shut: async () => await this.#shut(options.abortAllRequests ?? false, left()),',
    after: 'shut: async () => await this.#shut(options.abortAllRequests ?? false, this.#deadlineMs),',
    tests: ['test/weights/update.test.ts']
  },
  {
    why: 'the opening of the gate after a release of memory is not awaited',
    file: 'src/weights/memory.ts',
    before: `    // The contents of the KV cache are gone, so the prefix cache must not find them.
    await gate.open`,
    after: `    // The contents of the KV cache are gone, so the prefix cache must not find them.
    void gate.open`,
    tests: ['test/weights/update.test.ts']
  },
  {
    why: 'a failed opening of the gate lets no later update in',
    file: 'src/weights/update.ts',
    before: `    } finally {
      shadow?.end()
      this.#context.leave()
    }`,
    after: `    } catch (error) {
      throw error
    }
    this.#context.leave()`,
    tests: ['test/weights/update.test.ts']
  },
  {
    why: 'a tensor that arrived in part counts as untouched',
    file: 'src/weights/scatter.ts',
    before: 'touched: states.some(state => state !== TENSOR_UNTOUCHED), bytes, inPlace',
    after: 'touched: states.some(state => state === TENSOR_WRITTEN), bytes, inPlace',
    tests: ['test/weights/weight-store.test.ts']
  },
  {
    why: 'a write that the addon rejects counts as untouched',
    file: 'src/weights/scatter.ts',
    before: 'states: new Uint8Array(tensors).fill(TENSOR_PARTIAL),',
    after: 'states: new Uint8Array(tensors).fill(TENSOR_UNTOUCHED),',
    tests: ['test/weights/scatter.test.ts']
  },
  {
    why: 'the error of a slice names a tensor of the first slice',
    file: 'src/weights/scatter.ts',
    before: 'tensor: outcome.error.tensor + first }',
    after: 'tensor: outcome.error.tensor }',
    tests: ['test/weights/scatter.test.ts']
  },
  {
    why: 'the last slice of a large write is left out',
    file: 'src/weights/scatter.ts',
    before: '  if (first < plan.tensors.length) yield [first, plan.tensors.length]',
    after: '  if (first < plan.tensors.length && bytes > SLICE_BYTES / 2) yield [first, plan.tensors.length]',
    tests: ['test/weights/scatter.test.ts']
  },
  {
    why: 'a stream that ends early is a success',
    file: 'src/weights/scatter-stream.ts',
    before: 'if (error === undefined && rest.length > 0) {',
    after: 'if (error === undefined && rest.length > 1) {',
    tests: ['test/weights/stream.test.ts']
  },
  {
    why: 'the part of a broken stream that was written is not known to be touched',
    file: 'src/weights/scatter-stream.ts',
    before: 'touched ||= outcome.states.some(state => state !== TENSOR_UNTOUCHED)',
    after: 'touched ||= outcome.error !== undefined',
    tests: ['test/weights/stream.test.ts']
  },
  {
    why: 'a second look at a changed source after the write is left out',
    file: 'src/weights/update.ts',
    before: 'const moved = await source.verify().then(() => undefined, (error: unknown) => error)',
    after: 'const moved: unknown = undefined',
    tests: ['test/weights/weight-store.test.ts']
  },
  {
    why: 'the check of a source after the wait for the gate is left out',
    file: 'src/weights/update.ts',
    before: `    await source.verify()
    const shut`,
    after: '    const shut',
    tests: ['test/weights/weight-store.test.ts']
  },
  {
    why: 'a failed write moves its label',
    file: 'src/weights/update.ts',
    before: 'if (this.#torn.length > 0 && options.allowTorn !== true) throw',
    after: 'if (this.#torn.length > 0 && options.allowTorn === false) throw',
    tests: ['test/weights/weight-store.test.ts']
  },
  {
    why: 'a source that changed while it was written tears only what had not arrived',
    file: 'src/weights/update.ts',
    before: '[...names(moved === undefined ? outcome.rest : [...plan.tensors.keys()])]',
    after: '[...names(outcome.rest)]',
    tests: ['test/weights/weight-store.test.ts']
  },
  {
    why: 'torn tensors stay in the list of written ones',
    file: 'src/weights/update.ts',
    before: `    for (const name of rest) if (this.#written.delete(name)) this.#lost.add(name)
`,
    after: '',
    tests: [
      'test/weights/transaction.test.ts',
      'test/weights/transaction-edges.test.ts',
      'test/weights/weight-store.test.ts',
      'test/weights/transaction-random.test.ts'
    ]
  },
  {
    why: 'a write without a change of the epoch',
    file: 'src/weights/weight-state.ts',
    before: `    this.#epoch++
    for (const name of names) this.#heal(name)`,
    after: '    for (const name of names) this.#heal(name)',
    tests: ['test/weights/weight-state.test.ts']
  },
  {
    why: 'memory that comes back empty is not torn',
    file: 'src/weights/weight-state.ts',
    before: "if (tag === 'weights' && !kept) this.markAllTorn",
    after: "if (tag === 'weights' && kept) this.markAllTorn",
    tests: ['test/weights/weight-state.test.ts']
  },
  {
    why: 'the coverage of a step counts tensors of the step before',
    file: 'src/weights/weight-state.ts',
    before: 'this.writtenAt(name) <= epoch || this.#torn.has(name)',
    after: 'this.writtenAt(name) < epoch || this.#torn.has(name)',
    tests: ['test/weights/weight-state.test.ts']
  },
  {
    why: 'a name of an alternative spelling covers no weights',
    file: 'src/weights/match.ts',
    before: 'for (const plan of found.keys()) alternative ||= plan.alternative',
    after: 'for (const plan of found.keys()) alternative &&= plan.alternative',
    tests: ['test/weights/weight-store.test.ts', 'test/weights/planner.test.ts']
  },
  {
    why: 'a transposed shape with the same number of elements is accepted',
    file: 'src/weights/match.ts',
    before: 'tensor.shape.every((size, axis) => size === plan.shape[axis])',
    after: 'tensor.shape.reduce((a, b) => a * b, 1) === plan.shape.reduce((a, b) => a * b, 1)',
    tests: ['test/weights/weight-store.test.ts']
  },
  {
    why: 'unknown names are ignored also for strict callers',
    file: 'src/weights/match.ts',
    before: '(table.ignored(name) || !strictNames ? ignored : unknown)',
    after: '(table.ignored(name) || strictNames ? ignored : unknown)',
    tests: ['test/weights/weight-store.test.ts']
  },
  {
    why: "an engine's parameter that one rank lacks is taken from another rank",
    file: 'src/weights/match.ts',
    before: 'if (owner === undefined && ownOnly) {',
    after: 'if (owner === undefined && ownOnly && rank === 0) {',
    tests: ['test/weights/match.test.ts']
  },
  {
    why: 'rows of a later part are written over the first rows',
    file: 'src/weights/plan.ts',
    before: 'dstRow: rect.dstRow + from - rect.srcRow }]',
    after: 'dstRow: rect.dstRow }]',
    tests: ['test/weights/match.test.ts']
  },
  {
    why: 'the last row of a part is cut off',
    file: 'src/weights/plan.ts',
    before: 'const end = Math.min(rect.srcRow + rect.rows, firstRow + rows)',
    after: 'const end = Math.min(rect.srcRow + rect.rows, firstRow + rows) - 1',
    tests: ['test/weights/match.test.ts']
  },
  {
    why: 'a known plan is used with the offsets of the step before',
    file: 'src/weights/planner.ts',
    before: `    job.tensors[at + TENSOR.offset] = offset
`,
    after: '',
    tests: ['test/weights/planner.test.ts']
  },
  {
    why: 'a known plan is used for another dtype',
    file: 'src/weights/planner.ts',
    before: 'if (a.name !== b.name || a.dtype !== b.dtype || b.parts',
    after: 'if (a.name !== b.name || b.parts',
    tests: ['test/weights/planner.test.ts']
  },
  {
    why: 'a copy that differs between ranks passes as one checksum',
    file: 'src/weights/checksum.ts',
    before: '} else if (before !== shares[index] && !torn) {',
    after: '} else if (before !== shares[index] && torn) {',
    tests: ['test/weights/weight-store.test.ts']
  },
  {
    why: 'a region that several ranks hold counts twice',
    file: 'src/weights/checksum.ts',
    before: `    const before = seen.get(region)
`,
    after: `    const before = undefined as bigint | undefined
`,
    tests: ['test/weights/weight-store.test.ts']
  },
  {
    why: 'a later update overtakes one that waits',
    file: 'src/weights/exclusive-section.ts',
    before: 'if (!this.#blocks({ names }, this.#waiting)) {',
    after: 'if (!this.#blocks({ names }, [])) {',
    tests: ['test/weights/exclusive-section.test.ts']
  },
  {
    why: 'an update that left twice lets two in',
    file: 'src/weights/exclusive-section.ts',
    before: 'if (this.#inside.delete(claim)) this.#admit()',
    after: `this.#inside.clear()
      this.#admit()`,
    tests: ['test/weights/exclusive-section.test.ts']
  },
  {
    why: 'a waiter that gave up keeps its place',
    file: 'src/weights/exclusive-section.ts',
    before: `        this.#waiting.splice(this.#waiting.indexOf(waiter), 1)
`,
    after: '',
    tests: ['test/weights/exclusive-section.test.ts']
  },
  {
    why: 'a transaction is committed with a failed bucket',
    file: 'src/weights/transaction.ts',
    before: 'if (missing.length + this.#failed.size > 0) {',
    after: 'if (missing.length > 0) {',
    tests: ['test/weights/transaction.test.ts']
  },
  {
    why: 'an aborted transaction leaves written tensors untorn',
    file: 'src/weights/transaction.ts',
    before: 'if (written.size > 0 && !isWhole && !isShadowed) {',
    after: 'if (written.size > 1 && !isWhole && this.#failed.size > 0) {',
    tests: ['test/weights/transaction.test.ts']
  },
  {
    why: 'a commit does not wait for the writes before it',
    file: 'src/weights/transaction.ts',
    before: `      const leave = await this.#inside.enter(this.#deadline.msLeft)
      try {
        // A client`,
    after: `      const leave = (): void => {}
      try {
        // A client`,
    tests: [
      'test/weights/transaction.test.ts',
      'test/weights/transaction-races.test.ts',
      'test/weights/transaction-random.test.ts'
    ]
  },
  {
    why: "a stranger's update joins an open transaction",
    file: 'src/weights/transactions.ts',
    before: `if (current !== null) throw current.conflict()
    return null`,
    after: 'return null',
    tests: ['test/weights/transaction-owners.test.ts', 'test/weights/transaction.test.ts']
  },
  {
    why: 'the deadline of a scope counts during its calls',
    file: 'src/weights/transaction-deadline.ts',
    before: `    if (isIdle) this.#disarm()
`,
    after: '',
    tests: [
      'test/weights/transaction-edges.test.ts',
      'test/weights/transaction.test.ts',
      'test/weights/transaction-owners.test.ts'
    ]
  },
  {
    why: 'the status of the oldest transaction is kept for ever',
    file: 'src/weights/transactions.ts',
    before: 'if (this.#ended.size > REMEMBERED) this.#ended.delete',
    after: 'if (this.#ended.size > 2 * REMEMBERED) this.#ended.delete',
    tests: ['test/weights/transaction-edges.test.ts']
  },
  {
    why: 'a release begins while a read of weights is under way',
    file: 'src/weights/memory.ts',
    before: "if (tag === 'weights') await readers.idle()",
    after: "if (tag === 'weights') void readers.idle()",
    tests: ['test/weights/memory.test.ts']
  },
  {
    why: 'the KV cache of held requests is released',
    file: 'src/weights/memory.ts',
    before: "if (holders === 0 || !tags.includes('kv_cache')) return",
    after: "if (holders <= 1 || !tags.includes('kv_cache')) return",
    tests: ['test/weights/memory.test.ts', 'test/e2e/memory.test.ts']
  },
  {
    why: 'a label is not kept from a transaction that is open',
    file: 'src/weights/transactions.ts',
    before: `if (!this.#current.isScope) throw this.#current.conflict()
    this.#current.defer(version, false)`,
    after: `if (!this.#current.isScope) return false
    this.#current.defer(version, false)`,
    tests: ['test/weights/transaction-owners.test.ts', 'test/weights/transaction.test.ts']
  },
  {
    why: 'the first tensor of a piece is written at the place of the second',
    file: 'src/weights/cut-job.ts',
    before: 'into[to + RECT.dstRow] = rects[at + RECT.dstRow]! + top - srcRow',
    after: 'into[to + RECT.dstRow] = rects[at + RECT.dstRow]!',
    tests: ['test/weights/stream.test.ts']
  },
  {
    why: 'an element that two pieces of a stream share is written by neither',
    file: 'src/weights/cut-job.ts',
    before: 'done = Math.min(done, this.#begin(tensor) + byteOf(lines, last))',
    after: 'done = Math.max(done, 0)',
    tests: ['test/adapters/stream.test.ts', 'test/weights/stream.test.ts']
  },
  {
    why: 'an adapter at another place in memory is read from where the one before it was',
    file: 'src/adapters/slot-memory.ts',
    before: 'const isKnown = known?.modules === modules && known.sources',
    after: 'const isKnown = known !== undefined && known.sources',
    tests: ['test/adapters/slot-memory.test.ts']
  },
  {
    why: 'a slot whose memory was lost is written as if it held what it did',
    file: 'src/adapters/slot-memory.ts',
    before: 'this.#held.length = 0',
    after: '',
    tests: ['test/adapters/slot-memory.test.ts']
  },
  {
    why: "expected checksums ignore where a module's part of a fused tensor begins",
    file: 'src/adapters/sent-tensor.ts',
    before: '(offset - this.#begin) / size',
    after: '0',
    tests: ['test/adapters/stream.test.ts']
  }
]
