import type { Mutant } from './mutant.ts'

export const engine: readonly Mutant[] = [
  {
    why: 'all tokens of a batch with two labels get the first label',
    file: 'src/engine/event-packer.ts',
    before: 'if (event.weightVersion !== batch.version) {',
    after: "if (batch.version === '') {",
    tests: ['test/engine/event-packer.test.ts']
  },
  {
    why: 'retractions of a request are reported once',
    file: 'src/engine/event-packer.ts',
    before: 'if (event.retractions !== (this.#retractions.get(id) ?? 0)) {',
    after: 'if (event.retractions > 0 && !this.#retractions.has(id)) {',
    tests: ['test/engine/event-packer.test.ts']
  },
  {
    why: 'a token counts although the event has none',
    file: 'src/engine/event-unpacker.ts',
    before: 'if (token >= 0) this.#completionTokens++',
    after: 'this.#completionTokens++',
    tests: ['test/engine/event-packer.test.ts']
  },
  {
    why: 'a settle is answered before the steps under way have ended',
    file: 'src/engine/scheduling/scheduler.ts',
    before: 'this.#settles[0]!.after <= this.#batcher.steps.ended',
    after: 'this.#settles[0]!.after <= this.#batcher.steps.begun',
    tests: ['test/engine/scheduler-overlap.test.ts']
  },
  {
    why: 'a request goes on after its last mapped event',
    file: 'src/engine/mapped-events.ts',
    before: 'if (event.finish !== null) await this.return()',
    after: '',
    tests: ['test/engine/mapped-events.test.ts']
  },
  {
    why: 'slices of a header are parsed without a pause',
    file: 'src/sources/disk/safetensors-tensors.ts',
    before: 'if (isLate) await breathe()',
    after: '',
    tests: ['test/sources/slices.test.ts']
  },
  {
    why: 'slots of requests that have ended stay taken',
    file: 'src/engine/adapter-requests.ts',
    before: 'lease?.release()',
    after: '',
    tests: ['test/adapters/versions.test.ts']
  },
  {
    why: 'steps run while the gate is shut',
    file: 'src/engine/scheduling/scheduler.ts',
    before: 'return !this.#gateShut && this.#paused === null &&',
    after: 'return this.#paused === null &&',
    tests: ['test/engine/scheduler-gate.test.ts']
  },
  {
    why: 'a pause does not wait for the step under way',
    file: 'src/engine/scheduling/scheduler.ts',
    before: `    this.#batcher.land()
    this.#paused = mode
`,
    after: `    this.#paused = mode
`,
    tests: ['test/engine/scheduler-overlap.test.ts', 'test/engine/scheduler-random.test.ts']
  },
  {
    why: 'a step goes on when all its requests have ended',
    file: 'src/engine/scheduling/scheduler.ts',
    before: `    this.#batcher.landUnwanted()
`,
    after: '',
    tests: ['test/engine/scheduler-overlap.test.ts', 'test/engine/scheduler-random.test.ts']
  },
  {
    why: 'a request that has left gets the results of the step under way',
    file: 'src/engine/scheduling/step-builder.ts',
    before: "return this.sequences[i]!.state === 'running'",
    after: "return this.sequences[i]!.state !== 'queued'",
    tests: ['test/engine/scheduler-overlap.test.ts', 'test/engine/scheduler-random.test.ts']
  },
  {
    why: 'the results of a request that has left are given to the next',
    file: 'src/engine/result-cursor.ts',
    before: 'this.#top += top',
    after: 'this.#top += 0 * top',
    tests: ['test/engine/scheduler-overlap.test.ts', 'test/engine/scheduler-random.test.ts']
  },
  {
    why: 'penalties of the next token miss the last one',
    file: 'src/engine/sequences/sequence.ts',
    before: 'return !this.penalties && this.constraint === null',
    after: 'return this.constraint === null',
    tests: ['test/engine/scheduler-overlap.test.ts', 'test/engine/scheduler-random.test.ts']
  },
  {
    why: 'a token has the label of the weights at the end of its step',
    file: 'src/engine/scheduling/batcher.ts',
    before: 'const { sequences, takes, samples, drafts, version } = step',
    after: 'const { sequences, takes, samples, drafts } = step, version = step.version = this.version',
    tests: ['test/engine/scheduler-overlap.test.ts']
  },
  {
    why: 'a heartbeat forgets the requests of the first of two steps',
    file: 'src/engine/heartbeat.ts',
    before: 'const side = fields[BEGUN]! & 1',
    after: 'const side = 0',
    tests: ['test/engine/scheduler-asleep.test.ts']
  },
  {
    why: 'the gate shuts while retracted requests wait',
    file: 'src/engine/scheduling/scheduler.ts',
    before: '(isStopped || this.#shuts[0]!.inPlace || running.length + startedWaiting === 0)',
    after: '(isStopped || this.#shuts[0]!.inPlace || running.length === 0)',
    tests: ['test/engine/scheduler-gate.test.ts']
  },
  {
    why: 'the second of two waiters for the gate gets it first',
    file: 'src/engine/scheduling/scheduler.ts',
    before: 'this.#options.sink.reply(this.#shuts.shift()!.call, true)',
    after: 'this.#options.sink.reply(this.#shuts.pop()!.call, true)',
    tests: ['test/engine/scheduler-gate.test.ts']
  },
  {
    why: 'a new epoch keeps the prefix cache',
    file: 'src/engine/scheduling/batcher.ts',
    before: `    this.dropCache()
    this.#goOn(() => true)
`,
    after: `    this.#goOn(() => true)
`,
    tests: ['test/engine/scheduler-gate.test.ts']
  },
  {
    why: 'new weights come under the old label',
    file: 'src/engine/scheduling/scheduler.ts',
    before: 'this.#batcher.use({ set, epoch, version }, keepOld)',
    after: "this.#batcher.use({ set, epoch, version: 'old' }, keepOld)",
    tests: ['test/engine/scheduler-gate.test.ts']
  },
  {
    why: 'a resume opens a drained engine without a reply',
    file: 'src/engine/scheduling/scheduler.ts',
    before: `    for (const call of this.#drains) this.#options.sink.reply(call, false)
`,
    after: '',
    tests: ['test/engine/scheduler-drain.test.ts']
  },
  {
    why: 'a cancelled wait for the gate still shuts it',
    file: 'src/engine/scheduling/scheduler.ts',
    before: `    this.#shuts.splice(at, 1)
`,
    after: '',
    tests: ['test/engine/scheduler-gate.test.ts']
  },
  {
    why: 'a queue takes one request too few',
    file: 'src/engine/scheduling/scheduler.ts',
    before: 'if (running + waiting >= maxRunningRequests + maxQueuedRequests) {',
    after: 'if (running + waiting + 1 >= maxRunningRequests + maxQueuedRequests) {',
    tests: ['test/engine/scheduler.test.ts']
  },
  {
    why: 'a sequence of mixed weights enters the prefix cache',
    file: 'src/engine/memory/kv-memory.ts',
    before: 'if (seq.mixed || full <=',
    after: 'if (full <=',
    tests: ['test/engine/scheduler-gate.test.ts', 'test/engine/scheduler-random.test.ts']
  },
  {
    why: 'the page of the last token is taken from the cache',
    file: 'src/engine/sequences/sequence.ts',
    before: 'Math.max(score, 1) - 1 : this.length - 1)',
    after: 'Math.max(score, 1) - 1 : this.length)',
    tests: ['test/engine/scheduler.test.ts']
  },
  {
    why: 'a salt shares the cache of requests without one',
    file: 'src/engine/sequences/prefix-cache.ts',
    before: 'this.#roots.set(salt, root)',
    after: "this.#roots.set('', root)",
    tests: ['test/engine/prefix-cache.test.ts', 'test/engine/scheduler.test.ts']
  },
  {
    why: 'two pages with one hash are taken for each other',
    file: 'src/engine/sequences/prefix-cache.ts',
    before: 'if (node.parent === parent && this.#equal(node.page, tokens, from)) return node',
    after: 'if (node.parent === parent) return node',
    tests: ['test/engine/prefix-cache.test.ts']
  },
  {
    why: 'the most recent leaf is evicted first',
    file: 'src/engine/sequences/prefix-cache.ts',
    before: 'this.#evict(this.#oldest)',
    after: 'this.#evict(this.#newest!)',
    tests: ['test/engine/prefix-cache.test.ts']
  },
  {
    why: 'a page that was computed twice is never freed',
    file: 'src/engine/sequences/prefix-cache.ts',
    before: `        this.#pages.release(pages[i]!)
        pages[i] = child.page`,
    after: '        pages[i] = child.page',
    tests: ['test/engine/prefix-cache.test.ts']
  },
  {
    why: 'a stop string that overlaps itself is missed',
    file: 'src/engine/scheduling/stop-matcher.ts',
    before: 'while (state > 0 && stop.charCodeAt(state) !== unit) state = this.#failures[i]![state - 1]!',
    after: 'if (stop.charCodeAt(state) !== unit) state = 0',
    tests: ['test/engine/stop-matcher.test.ts']
  },
  {
    why: 'the longest of several stop strings does not win',
    file: 'src/engine/scheduling/stop-matcher.ts',
    before: 'if (matched === null || stop.length > matched.length) matched = stop',
    after: 'matched ??= stop',
    tests: ['test/engine/stop-matcher.test.ts']
  },
  {
    why: 'end tokens are banned one token too long',
    file: 'src/engine/scheduling/step-builder.ts',
    before: 'if (completion < sampling.minNewTokens &&',
    after: 'if (completion <= sampling.minNewTokens &&',
    tests: ['test/engine/step-builder.test.ts']
  },
  {
    why: 'the limit of tokens is passed by one',
    file: 'src/engine/sequences/sequence.ts',
    before: 'return this.length >= this.maxLength ?',
    after: 'return this.length > this.maxLength ?',
    tests: ['test/engine/scheduler.test.ts']
  },
  {
    why: 'a prompt score belongs to the position before',
    file: 'src/engine/scheduling/step-builder.ts',
    before: 'this.#scoreRow(seq, base + position - 1, position)',
    after: 'this.#scoreRow(seq, base + position, position)',
    tests: ['test/engine/scheduler.test.ts']
  },
  {
    why: 'seeds of a batch of more than 64 rows are lost',
    file: 'src/engine/scheduling/step-builder.ts',
    before: `      seeds.set(this.#rowSeeds)
`,
    after: '',
    tests: ['test/engine/step-builder.test.ts']
  },
  {
    why: 'samples at one place of a grammar do not share their mask',
    file: 'src/engine/scheduling/step-builder.ts',
    before: `      at = this.#maskAt.size
      this.#maskAt.set(mask, at)`,
    after: '      at = this.#maskAt.size',
    tests: ['test/engine/constraints.test.ts']
  },
  {
    why: 'a bad word is banned one token too late',
    file: 'src/engine/sequences/sequence.ts',
    before: 'const first = this.length + guesses - word.length + 1',
    after: 'const first = this.length - word.length',
    tests: ['test/engine/step-builder.test.ts']
  },
  {
    why: 'a retracted request is put at the end of the queue',
    file: 'src/engine/scheduling/waiting-queue.ts',
    before: 'if (before !== null && before.arrival > seq.arrival) {',
    after: 'if (before === null) {',
    tests: ['test/engine/scheduler.test.ts', 'test/engine/scheduler-random.test.ts']
  },
  {
    why: 'waiters of an aborted prefill wait for ever',
    file: 'src/engine/scheduling/prefill-sharing.ts',
    before: "return waiters.filter((waiter) => waiter.state === 'parked')",
    after: "return waiters.filter((waiter) => waiter.state === 'queued')",
    tests: ['test/engine/scheduler.test.ts']
  },
  {
    why: 'the gate is taken for shut although requests run',
    file: 'src/engine/idle-tracker.ts',
    before: 'return this.#gates++ === 0 && (idle || (!abort && (this.#paused || this.#asleep)))',
    after: 'return this.#gates++ === 0 && (idle || this.#paused || this.#asleep)',
    tests: ['test/engine/idle-tracker.test.ts', 'test/engine/scheduler-client.test.ts']
  },
  {
    why: 'an outdated reply to a pause counts',
    file: 'src/engine/idle-tracker.ts',
    before: 'if (turn === this.#turns) this.#paused = true',
    after: 'this.#paused = true',
    tests: ['test/engine/idle-tracker.test.ts']
  },
  {
    why: 'a stream that is left early keeps its request running',
    file: 'src/engine/scheduler-client.ts',
    before: `        if (this.#closed === null) this.#end({ type: 'abort', id })
`,
    after: '',
    tests: ['test/engine/scheduler-client.test.ts']
  },
  {
    why: 'a gate that could not be shut is never asked for again',
    file: 'src/engine/scheduler-client.ts',
    before: 'if (!done) this.#idleTracker.gateGivenUp()',
    after: 'if (done) this.#idleTracker.gateGivenUp()',
    tests: ['test/engine/scheduler-client.test.ts', 'test/engine/idle-tracker.test.ts']
  },
  {
    why: 'an error that a reader has not awaited yet is lost',
    file: 'src/engine/token-stream.ts',
    before: `      this.#error = error
      return`,
    after: '      return',
    tests: ['test/engine/token-stream.test.ts']
  },
  {
    why: 'replies to calls overtake the events before them',
    file: 'src/engine/worker-loop.ts',
    before: `  #send (): void {
`,
    after: `  #send (): void {
    for (const reply of this.#replies) this.#post(reply)
    this.#replies = []
`,
    tests: ['test/engine/scheduler-client.test.ts']
  }
]
