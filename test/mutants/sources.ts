import type { Mutant } from './mutant.ts'

export const sources: readonly Mutant[] = [
  {
    why: 'a copied tensor is read at its place in the memory of its sender',
    file: 'src/sources/tensor/copied-tensors.ts',
    before: 'offset: tensor.offset - begin,',
    after: 'offset: tensor.offset,',
    tests: ['test/sources/copied-tensors.test.ts']
  },
  {
    why: 'a file that is rewritten with its size and mtime restored counts as unchanged',
    file: 'src/sources/disk/watched-file.ts',
    before: "'mtimeNs', 'ctimeNs'] as const",
    after: "'mtimeNs'] as const",
    tests: ['test/sources/disk-changes.test.ts']
  },
  {
    why: 'a file that was replaced by another of the same path counts as unchanged',
    file: 'src/sources/disk/watched-file.ts',
    before: 'if (there?.ino !== this.#opened.ino || there.dev !== this.#opened.dev) {',
    after: 'if (there === undefined) {',
    tests: ['test/sources/disk-changes.test.ts']
  },
  {
    why: 'a file that is written at this moment is opened at once',
    file: 'src/sources/disk/watched-file.ts',
    before: 'Number(opened.mtimeMs)) >= TICK_MS) {',
    after: 'Number(opened.mtimeMs)) >= 0) {',
    tests: ['test/sources/disk-changes.test.ts']
  },
  {
    why: 'only the first file of a checkpoint is checked for changes',
    file: 'src/sources/disk/disk.ts',
    before: 'for (const file of this.#watched) await file.verify()',
    after: 'await this.#watched[0]!.verify()',
    tests: ['test/sources/disk-changes.test.ts']
  },
  {
    why: 'a folder whose name begins like a root is inside it',
    file: 'src/sources/disk/path-jail.ts',
    before: 'root.endsWith(sep) ? root : root + sep))',
    after: 'root))',
    tests: ['test/sources/disk-refusals.test.ts']
  },
  {
    why: 'a folder that is swapped for a link after the check is read',
    file: 'src/sources/disk/path-jail.ts',
    before: 'if (opened === undefined || !this.contains(opened)) throw',
    after: 'if (opened === undefined) throw',
    tests: ['test/sources/disk-races.test.ts', 'test/sources/disk-refusals.test.ts']
  },
  {
    why: 'the last shard of a checkpoint may be missing',
    file: 'src/sources/disk/checkpoint-files.ts',
    before: 'for (let i = 1; i <= Number(total); i++) {',
    after: 'for (let i = 1; i < Number(total); i++) {',
    tests: ['test/sources/disk-refusals.test.ts']
  },
  {
    why: 'a tensor that two files hold is taken from the later one',
    file: 'src/sources/disk/disk.ts',
    before: 'if (owner !== undefined) throw formatError',
    after: 'if (owner === source) throw formatError',
    tests: ['test/sources/disk-refusals.test.ts']
  },
  {
    why: 'an index of other files than those beside it is not compared',
    file: 'src/sources/disk/disk.ts',
    before: `if (index !== undefined) {
      checkIndex`,
    after: `if (index !== undefined && names.length > 1000) {
      checkIndex`,
    tests: ['test/sources/disk-refusals.test.ts', 'test/sources/disk.test.ts']
  },
  {
    why: 'files of a refused checkpoint stay open',
    file: 'src/sources/disk/disk.ts',
    before: `    await closeAll()
    throw error`,
    after: '    throw error',
    tests: ['test/sources/disk-refusals.test.ts']
  },
  {
    why: 'a delta is written over the weights of another client',
    file: 'src/sources/tensor/sparse-delta.ts',
    before: 'patches])), bytes, baseEpoch },',
    after: 'patches])), bytes },',
    tests: ['test/weights/patch-source.test.ts']
  },
  {
    why: 'an offset of shared memory leaves out its header',
    file: 'src/sources/announce-tensors.ts',
    before: "storage.kind === 'shared-file' ? SHARED_FILE_HEADER :",
    after: "storage.kind === 'shared-file' ? 0 :",
    tests: ['test/sources/announce-tensors.test.ts']
  },
  {
    why: 'a tensor that one rank has elsewhere is read from the first rank',
    file: 'src/sources/announce-tensors.ts',
    before: 'a.storage === b.storage && a.offset === b.offset &&',
    after: 'a.dtype === b.dtype &&',
    tests: ['test/sources/announce-tensors.test.ts']
  },
  {
    why: 'rows with gaps between them are read as packed',
    file: 'src/sources/announce-tensors.ts',
    before: '(rows === 1 || rowBytes === cols * itemBytes)',
    after: '(rows === 1 || rowBytes >= cols * itemBytes)',
    tests: ['test/sources/announce-tensors.test.ts']
  },
  {
    why: 'references of counters are not given back',
    file: 'src/sources/tensor/request-handles.ts',
    before: `      handles += this.#withFile(name, fd => this.#addon.dropCudaReferences(fd, slots))
`,
    after: `      handles += slots.length
`,
    tests: ['test/e2e/tensor-cuda.test.ts', 'test/e2e/tensor-kept.test.ts']
  },
  {
    why: 'the file of a last reference stays in shared memory',
    file: 'src/sources/tensor/request-handles.ts',
    before: 'if (this.#addon.dropFileReferences(fd, references) === 0) unlinkSharedMemory(name)',
    after: 'this.#addon.dropFileReferences(fd, references)',
    tests: ['test/sources/tensor-receiver.test.ts', 'test/sources/handle-thread.test.ts']
  },
  {
    why: 'references that were never opened are not given back',
    file: 'src/sources/tensor/request-handles.ts',
    before: 'if (this.#spares !== undefined) handles += this.#drop(this.#spares)',
    after: 'if (this.#spares !== undefined && handles === 0) handles += this.#drop(this.#spares)',
    tests: ['test/sources/weight-loader-pickles.test.ts']
  },
  {
    why: 'shared memory that is too short is mapped',
    file: 'src/sources/tensor/request-handles.ts',
    before: 'if (file.bytes < SHARED_FILE_HEADER + bytes) {',
    after: 'if (file.bytes < bytes) {',
    tests: ['test/sources/tensor-receiver.test.ts']
  },
  {
    why: 'a kept generation is written under another number',
    file: 'src/sources/tensor/kept-tensors.ts',
    before: 'if (kept.generation !== generation) {',
    after: 'if (kept.generation > generation) {',
    tests: ['test/e2e/tensor-kept.test.ts']
  },
  {
    why: 'equal requests for kept tensors are joined',
    file: 'src/updates/tensor-update.ts',
    before: 'return await runUpdate(host, options, async write => {',
    after: "return await runUpdate(host, { ...options, identity: ['kept', JSON.stringify(kept)] }, async write => {",
    tests: ['test/e2e/tensor-kept.test.ts']
  },
  {
    why: 'an update and its retry with another label are joined',
    file: 'src/updates/run-update.ts',
    before: 'JSON.stringify([transaction, scope, swap, onRunning, version, flushCache,',
    after: 'JSON.stringify([transaction, scope, swap, onRunning, flushCache,',
    tests: [
      'test/routes/sglang/weights.test.ts',
      'test/e2e/tensor-kept.test.ts',
      'test/plugin.test.ts',
      'test/e2e/transactions.test.ts'
    ]
  },
  {
    why: 'a source stays open after a failed write',
    file: 'src/updates/run-update.ts',
    before: `    const report = await write().finally(async () => {
      await source.close()
    })`,
    after: `    const report = await write()
    await source.close()`,
    tests: [
      'test/routes/sglang/weights.test.ts',
      'test/sources/tensor-receiver.test.ts',
      'test/e2e/tensor-cuda-faults.test.ts'
    ]
  },
  {
    why: 'a refused bucket leaves its transaction complete',
    file: 'src/updates/run-update.ts',
    before: 'if (!isOpen) registerPending(engine, options().transaction, error)',
    after: 'if (isOpen) registerPending(engine, options().transaction, error)',
    tests: ['test/e2e/pending.test.ts', 'test/e2e/transactions.test.ts', 'test/e2e/scopes.test.ts']
  },
  {
    why: 'an upload turns to the next piece without its last bytes',
    file: 'src/sources/upload/upload-stream.ts',
    before: `    this.#filling.copy(next, 0, this.#bytes - OVERLAP, this.#bytes)
`,
    after: '',
    tests: ['test/sources/upload.test.ts']
  },
  {
    why: 'the last, incomplete piece of an upload is left out',
    file: 'src/sources/upload/upload-stream.ts',
    before: 'if (this.#filled === this.#carried) return undefined',
    after: 'if (this.#filled < this.#bytes) return undefined',
    tests: ['test/sources/upload.test.ts']
  },
  {
    why: 'a body that breaks off passes as its end',
    file: 'src/sources/upload/upload-stream.ts',
    before: `    if (this.#failure !== undefined) throw this.#failure
  }`,
    after: '  }',
    tests: ['test/sources/upload.test.ts', 'test/e2e/upload-refusals.test.ts']
  },
  {
    why: 'a buffer of an upload is not given back',
    file: 'src/sources/upload/upload-stream.ts',
    before: '...this.#full.map(({ slot }) => slot), this.#filling, this.#out]',
    after: '...this.#full.map(({ slot }) => slot), this.#filling]',
    tests: ['test/sources/upload.test.ts']
  },
  {
    why: 'pieces of an upload after the first begin too late',
    file: 'src/sources/upload/upload-stream.ts',
    before: 'this.#begin += this.#bytes - OVERLAP',
    after: 'this.#begin += this.#bytes',
    tests: ['test/sources/upload.test.ts']
  },
  {
    why: 'the last bytes of a spooled upload are not written',
    file: 'src/sources/upload/spool-sink.ts',
    before: 'this.#failure === undefined && this.#filled > 0) this.#flush',
    after: 'this.#failure === undefined && this.#filled > PAGE_BYTES) this.#flush',
    tests: ['test/sources/spool.test.ts', 'test/sources/upload.test.ts']
  },
  {
    why: 'an element across two spooled pieces loses its first bytes',
    file: 'src/sources/upload/spool-stream.ts',
    before: `    if (slot !== undefined) this.#tail.copy(slot, PAGE_BYTES - OVERLAP)
`,
    after: '',
    tests: ['test/sources/spool.test.ts', 'test/sources/upload.test.ts']
  },
  {
    why: 'memory of uploads passes its limit',
    file: 'src/sources/upload/upload-staging.ts',
    before: 'if (this.#live + size + leave > this.#limit) return undefined',
    after: 'if (size + leave > this.#limit) return undefined',
    tests: ['test/sources/upload.test.ts', 'test/sources/spool.test.ts', 'test/e2e/upload-limits.test.ts']
  },
  {
    why: 'a refused broadcast is not received',
    file: 'src/sources/distributed/distributed.ts',
    before: `      await stream.close()
      throw withNote(error, stream)`,
    after: '      throw withNote(error, stream)',
    tests: [
      'test/sources/distributed.test.ts',
      'test/e2e/groups-faults.test.ts',
      'test/process-groups/weight-groups.test.ts'
    ]
  },
  {
    why: 'a bucket larger than a slot is received',
    file: 'src/sources/distributed/distributed.ts',
    before: 'const index = sizes.findIndex(size => size > this.#bucketBytes)',
    after: 'const index = sizes.findIndex(size => size > 2 * this.#bucketBytes)',
    tests: ['test/sources/distributed.test.ts', 'test/e2e/groups-faults.test.ts']
  },
  {
    why: 'the slot of a semaphore is lost when its next waiter takes it',
    file: 'src/sources/semaphore.ts',
    before: 'if (next === undefined) this.#free++',
    after: 'if (next === undefined && this.#free > 0) this.#free++',
    tests: ['test/sources/spool.test.ts', 'test/sources/handle-thread.test.ts']
  },
  {
    why: 'a stretch of a parameter arrives a row too low',
    file: 'src/shards/messages.ts',
    before: 'pieces.dstRow[piece]! * param.cols',
    after: '(pieces.dstRow[piece]! + 1) * param.cols',
    tests: ['test/shards/plan.test.ts']
  },
  {
    why: 'shards of another dtype arrive in place unconverted',
    file: 'src/shards/messages.ts',
    before: 'if (isStretch && dtype === param.dtype && ',
    after: 'if (isStretch && ',
    tests: ['test/shards/plan.test.ts']
  },
  {
    why: "a refused update's messages are received into the parameters",
    file: 'src/sources/shards/message-jobs.ts',
    before: 'this.#isRefused ? 0 : param + 1',
    after: 'param + 1',
    tests: ['test/sources/message-jobs.test.ts']
  },
  {
    why: 'the messages of the next chunk wait for those of the one before',
    file: 'src/sources/shards/message-jobs.ts',
    before: 'if (this.#coming.length === 1) await',
    after: 'if (this.#coming.length === 9) await',
    tests: ['test/sources/message-jobs.test.ts']
  },
  {
    why: 'parts of an adapter from a group shut the gate of an engine with two sets',
    file: 'src/sources/distributed/distributed.ts',
    before: '    }, this.#isBeside)',
    after: '    }, false)',
    tests: ['test/sources/distributed.test.ts']
  }
]
