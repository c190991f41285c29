import type { Mutant } from './mutant.ts'

export const processGroups: readonly Mutant[] = [
  {
    why: 'a request for the gate runs after its caller was told that its deadline has passed',
    file: 'src/process-groups/lent-gate.ts',
    before: '        ended()\n        throw error',
    after: '        throw error',
    tests: ['test/process-groups/lent-gate-deadline.test.ts']
  },
  {
    why: 'a request that runs with the lent gate fails at its deadline',
    file: 'src/process-groups/lent-gate.ts',
    before: 'if (running !== undefined) return await running',
    after: '',
    tests: ['test/process-groups/lent-gate-deadline.test.ts']
  },
  {
    why: 'broadcasts of a joined piece begin at the piece before',
    file: 'src/process-groups/pieces.ts',
    before: '? piece.begin - begin + value',
    after: '? value',
    tests: ['test/process-groups/pieces.test.ts', 'test/process-groups/direct-places.test.ts']
  },
  {
    why: 'a piece is closed without its last broadcast',
    file: 'src/process-groups/pieces.ts',
    before: 'for (let index = first; index < end; index++) {',
    after: 'for (let index = first; index < end - 1; index++) {',
    tests: ['test/process-groups/pieces.test.ts']
  },
  {
    why: 'two pieces in a row use one slot',
    file: 'src/process-groups/pieces.ts',
    before: 'return index % 2 === 0 ? 0 : 1',
    after: 'return index % 4 < 2 ? 0 : 1',
    tests: [
      'test/process-groups/pieces.test.ts',
      'test/process-groups/broadcast-stream.test.ts',
      'test/e2e/groups.test.ts'
    ]
  },
  {
    why: 'a piece with one broadcast without a place goes straight',
    file: 'src/process-groups/direct-places.ts',
    before: 'return own.every((value, at)',
    after: 'return own.some((value, at)',
    tests: ['test/process-groups/direct-places.test.ts']
  },
  {
    why: 'places of a known job are used for another one',
    file: 'src/process-groups/direct-places.ts',
    before: 'areEqual(known.parts, parts) && areEqual(known.tensors, job.tensors)) return',
    after: 'areEqual(known.parts, parts)) return',
    tests: ['test/process-groups/direct-places.test.ts']
  },
  {
    why: 'ranks beyond the world are accepted',
    file: 'src/process-groups/group-spec.ts',
    before: 'if (rankOffset + ranks > worldSize) {',
    after: 'if (rankOffset >= worldSize) {',
    tests: ['test/process-groups/group-spec.test.ts']
  },
  {
    why: 'a group that differs in its sender counts as the same',
    file: 'src/process-groups/group-spec.ts',
    before: 'return [name, backend, form, address, port, rankOffset, worldSize, root, hosts, barrier]',
    after: 'return [name, backend, form, address, port, rankOffset, worldSize, hosts, barrier]',
    tests: ['test/process-groups/group-spec.test.ts']
  },
  {
    why: 'a refused stream takes the turn of the one after it',
    file: 'src/process-groups/broadcast-stream.ts',
    before: 'const live = ahead.find(stream => !stream.#isRefused)',
    after: 'const live = undefined as BroadcastStream | undefined',
    tests: ['test/process-groups/broadcast-stream.test.ts', 'test/e2e/groups-faults.test.ts']
  },
  {
    why: 'bytes of a refused request are not received',
    file: 'src/process-groups/broadcast-stream.ts',
    before: 'if (this.#given === this.#pieces.length || this.#group.failure !== null) return this.#finish()',
    after: 'return this.#finish()',
    tests: ['test/process-groups/broadcast-stream.test.ts', 'test/e2e/groups-faults.test.ts']
  },
  {
    why: 'a refused request is received straight into the weights',
    file: 'src/process-groups/broadcast-stream.ts',
    before: 'return this.#isRefused ? undefined : this.#places[index]',
    after: 'return this.#places[index]',
    tests: ['test/process-groups/direct-places.test.ts']
  },
  {
    why: 'a receive into the weights is not known to touch them',
    file: 'src/process-groups/broadcast-stream.ts',
    before: `          this.#touched = true
`,
    after: '',
    tests: ['test/process-groups/direct-places.test.ts']
  },
  {
    why: 'the drop of a stream ends before its running receive',
    file: 'src/process-groups/broadcast-stream.ts',
    before: `      await Promise.allSettled(this.#incoming.map(async incoming => {
        await incoming.arrive()
      }))
`,
    after: '',
    tests: [
      'test/process-groups/broadcast-stream.test.ts',
      'test/e2e/groups-in-place.test.ts',
      'test/e2e/groups-faults.test.ts'
    ]
  },
  {
    why: 'a staging slot is not grown for a larger piece',
    file: 'src/process-groups/reception.ts',
    before: 'if (room.bytes <= staged.bytes && room.slots <= staged.slots) return null',
    after: 'if (staged.bytes > 0) return null',
    tests: ['test/process-groups/broadcast-stream.test.ts']
  },
  {
    why: 'broadcasts go straight into the set of weights in use',
    file: 'src/process-groups/weight-group.ts',
    before: 'native.groupReceiveInPlace(this.handle, into.places, root, timeoutMs, into.set)',
    after: 'native.groupReceiveInPlace(this.handle, into.places, root, timeoutMs, 0)',
    tests: ['test/e2e/groups-in-place.test.ts']
  },
  {
    why: 'a group connects beside steps',
    file: 'src/process-groups/weight-group.ts',
    before: 'if (!isBeside || !this.needsGate || (this.#link!.isConnected && wanted === null)) return await run()',
    after: 'return await run()',
    tests: ['test/process-groups/direct-places.test.ts']
  },
  {
    why: 'a group that failed is used again',
    file: 'src/process-groups/weight-group.ts',
    before: `    this.#failure = error
    this.counts.failed++`,
    after: '    this.counts.failed++',
    tests: [
      'test/process-groups/weight-groups.test.ts',
      'test/e2e/groups-faults.test.ts',
      'test/process-groups/gone-trainers.test.ts'
    ]
  },
  {
    why: 'a trainer that has gone leaves its group joined',
    file: 'src/process-groups/weight-group.ts',
    before: "if (this.#streams.length + this.#phases.length > 0 || this.#state !== 'connected') {",
    after: 'if (this.#streams.length > 1) {',
    tests: [
      'test/process-groups/gone-trainers.test.ts',
      'test/e2e/groups-faults.test.ts',
      'test/process-groups/weight-groups.test.ts',
      'test/process-groups/store-watch.test.ts'
    ]
  },
  {
    why: 'an eager group does not meet in its barrier',
    file: 'src/process-groups/weight-group.ts',
    before: `if (!this.spec.barrier) return
        await`,
    after: `if (this.spec.barrier) return
        await`,
    tests: [
      'test/process-groups/vllm-group.test.ts',
      'test/e2e/vllm-weights.test.ts',
      'test/e2e/groups.test.ts',
      'test/process-groups/weight-groups.test.ts',
      'test/e2e/load-from.test.ts'
    ]
  }
]
