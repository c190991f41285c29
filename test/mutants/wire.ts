import type { Mutant } from './mutant.ts'

export const wire: readonly Mutant[] = [
  {
    why: 'a long integer of a pickle loses its sign',
    file: 'src/wire/pickle/read.ts',
    before: 'let value = BigInt(this.#bytes.readInt8(at + length - 1))',
    after: 'let value = BigInt(this.#bytes[at + length - 1]!)',
    tests: ['test/wire/pickle/read.test.ts']
  },
  {
    why: 'integers beyond 32 bits lose their upper part',
    file: 'src/wire/pickle/read.ts',
    before: 'const payload = high * 0x100_0000 + (low >>> 8)',
    after: 'const payload = low >>> 8',
    tests: ['test/wire/pickle/read.test.ts']
  },
  {
    why: 'the last item of a pickled list is left out',
    file: 'src/wire/pickle/read.ts',
    before: 'for (let index = from; index < to; index++) items[index - from] = this.#value(index)',
    after: 'for (let index = from; index < to - 1; index++) items[index - from] = this.#value(index)',
    tests: ['test/wire/pickle/read.test.ts']
  },
  {
    why: 'a name outside of the closed set is accepted',
    file: 'src/wire/pickle/read.ts',
    before: 'if (!(meaning instanceof PickleName)) return describeRefused(module, name, meaning)',
    after: `if (typeof meaning === 'string') return describeRefused(module, name, meaning)
    if (meaning === undefined) return 0`,
    tests: ['test/wire/pickle/read.test.ts', 'test/wire/pickle/fuzz.test.ts']
  },
  {
    why: 'a counter slot that stands for two storages is accepted',
    file: 'src/wire/torch/storage.ts',
    before: 'known.handle !== handle || known.offset !== offset || known.bytes !== bytes) {',
    after: 'known.handle !== handle || known.offset !== offset) {',
    tests: [
      'test/wire/torch/body.test.ts',
      'test/wire/torch/handle-lists.test.ts',
      'test/wire/torch/find-storages.test.ts'
    ]
  },
  {
    why: 'a storage longer than its blocks is accepted',
    file: 'src/wire/torch/storage.ts',
    before: 'if (mapped !== undefined && offset + bytes > mapped) {',
    after: 'if (mapped !== undefined && bytes > mapped) {',
    tests: [
      'test/wire/torch/body.test.ts',
      'test/wire/torch/handle-lists.test.ts',
      'test/e2e/tensor-cuda-faults.test.ts'
    ]
  },
  {
    why: 'a name of shared memory may lead to another file',
    file: 'src/wire/torch/storage.ts',
    before: 'const SHM_NAME = /^\\/torch_\\d{1,10}_\\d{1,10}(?:_\\d{1,20})?$/',
    after: 'const SHM_NAME = /^\\/torch_\\d{1,10}_\\d{1,10}/',
    tests: ['test/wire/torch/body.test.ts', 'test/sources/tensor-receiver.test.ts']
  },
  {
    why: 'a piece of a bucket is placed by elements of the wrong dtype',
    file: 'src/wire/torch/bucket.ts',
    before: 'offset: flat.offset + start * torchItemBytes(flat.dtype)!,',
    after: 'offset: flat.offset + start * torchItemBytes(dtype)!,',
    tests: ['test/wire/torch/body.test.ts']
  },
  {
    why: 'a piece may end behind its bucket',
    file: 'src/wire/torch/bucket.ts',
    before: 'if (end > flat.shape[0]!) throw',
    after: 'if (start > flat.shape[0]!) throw',
    tests: ['test/wire/torch/body.test.ts']
  },
  {
    why: 'a packed tensor of rank one is read with the stride of its last axis',
    file: 'src/wire/torch/matrix.ts',
    before: 'const colBytes = cols > 1 ? stride.at(-1)! * itemBytes : itemBytes',
    after: 'const colBytes = stride.at(-1)! * itemBytes',
    tests: ['test/wire/torch/matrix.test.ts']
  },
  {
    why: 'outer axes with gaps are merged',
    file: 'src/wire/torch/matrix.ts',
    before: 'if (outer !== undefined && outer.step === size * step)',
    after: 'if (outer !== undefined && outer.step >= size * step)',
    tests: ['test/wire/torch/matrix.test.ts']
  },
  {
    why: 'an expanded tensor is read as if it were whole',
    file: 'src/wire/torch/matrix.ts',
    before: 'if (shape.some((size, axis) => size > 1 && stride[axis] === 0)) {',
    after: 'if (shape.every((size, axis) => size > 1 && stride[axis] === 0)) {',
    tests: ['test/wire/torch/matrix.test.ts']
  },
  {
    why: 'the last element of a view may lie behind its storage',
    file: 'src/wire/torch/extent.ts',
    before: 'const end = offset + (last + 1) * itemBytes',
    after: 'const end = offset + last * itemBytes',
    tests: ['test/wire/torch/body.test.ts', 'test/wire/torch/matrix.test.ts']
  },
  {
    why: 'tensors of a safetensors file may overlap',
    file: 'src/wire/safetensors/header.ts',
    before: 'if (begin !== at) {',
    after: 'if (begin > at) {',
    tests: ['test/wire/safetensors/header.test.ts']
  },
  {
    why: 'bytes behind the last tensor of a file are ignored',
    file: 'src/wire/safetensors/header.ts',
    before: 'if (fileBytes !== null && at !== fileBytes) {',
    after: 'if (fileBytes !== null && at > fileBytes) {',
    tests: ['test/wire/safetensors/header.test.ts']
  },
  {
    why: 'a tensor shorter than its shape is accepted',
    file: 'src/wire/safetensors/header.ts',
    before: 'if (end - begin !== bytes) {',
    after: 'if (end - begin > bytes) {',
    tests: ['test/wire/safetensors/header.test.ts']
  },
  {
    why: 'a file of an index may lie in another folder',
    file: 'src/wire/safetensors/index.ts',
    before: '!/[/\\\\\\0-\\x1f]/.test(name)',
    after: '!/[\\\\\\0-\\x1f]/.test(name)',
    tests: ['test/wire/safetensors/index.test.ts']
  },
  {
    why: 'a header without padding is written',
    file: 'src/wire/safetensors/encode.ts',
    before: 'const length = Math.ceil(text.length / ALIGNMENT) * ALIGNMENT',
    after: 'const length = text.length',
    tests: ['test/wire/safetensors/header.test.ts', 'test/wire/safetensors/index.test.ts']
  },
  {
    why: 'a key that comes twice in a header is accepted',
    file: 'src/wire/strict-json.ts',
    before: 'if (seen.has(key)) throw',
    after: 'if (seen.has(key) && key.length > 1000) throw',
    tests: ['test/wire/strict-json.test.ts', 'test/wire/safetensors/header.test.ts']
  },
  {
    why: 'an integer beyond 2^53 is rounded',
    file: 'src/wire/strict-json.ts',
    before: 'if (value > Number.MAX_SAFE_INTEGER) throw',
    after: 'if (value === Infinity) throw',
    tests: ['test/wire/strict-json.test.ts']
  },
  {
    why: 'a message of a store in several parts loses its first part',
    file: 'src/wire/store/pull.ts',
    before: 'this.#bytes.copy(bytes, 0, this.#start, this.#end)',
    after: 'this.#bytes.copy(bytes, 0, 0, this.#end - this.#start)',
    tests: ['test/wire/store/codec.test.ts']
  },
  {
    why: 'keys of a store that are not UTF-8 become equal',
    file: 'src/wire/store/fields.ts',
    before: "(yield length).toString('latin1')",
    after: "(yield length).toString('utf8')",
    tests: ['test/wire/store/codec.test.ts']
  },
  {
    why: 'a value longer than the limit is taken',
    file: 'src/wire/store/fields.ts',
    before: `yield* readCount(Math.min(limit, left.left), "a value's length")`,
    after: `yield* readCount(left.left, "a value's length")`,
    tests: ['test/wire/store/codec.test.ts']
  },
  {
    why: 'a wait that ended just before its cancellation leaves a byte',
    file: 'src/wire/store/reply.ts',
    before: `  if (isCanceled()) {
    const second`,
    after: `  if (!isCanceled()) {
    const second`,
    tests: ['test/wire/store/codec.test.ts', 'test/rendezvous/client.test.ts']
  },
  {
    why: 'a client waits for the first of two keys',
    file: 'src/rendezvous/client.ts',
    before: 'await connection.wait(keys.map(wire), deadline, what)',
    after: 'await connection.wait(keys.slice(0, 1).map(wire), deadline, what)',
    tests: ['test/rendezvous/client.test.ts']
  },
  {
    why: 'the server of a store replies to a wait with its first key',
    file: 'src/rendezvous/server-state.ts',
    before: 'if (next === keys.length) {',
    after: 'if (next === keys.length || next > 0) {',
    tests: ['test/rendezvous/client.test.ts', 'test/rendezvous/server.test.ts']
  },
  {
    why: 'a store adds to the old value twice',
    file: 'src/rendezvous/server-state.ts',
    before: 'const sum = Number(text) + delta',
    after: 'const sum = Number(text) + delta + (Number(text) > 0 ? delta : 0)',
    tests: ['test/rendezvous/server.test.ts', 'test/rendezvous/client.test.ts']
  },
  {
    why: 'a store compares and sets without comparing',
    file: 'src/rendezvous/server-state.ts',
    before: '!held.equals(expected)) return held ?? expected',
    after: 'held.equals(expected)) return held ?? expected',
    tests: ['test/rendezvous/server.test.ts', 'test/rendezvous/client.test.ts']
  },
  {
    why: 'a reply that nobody waits for is given to the next caller',
    file: 'src/rendezvous/connection.ts',
    before: 'return this.#failure === undefined && !this.#retired',
    after: 'return this.#failure === undefined',
    tests: ['test/rendezvous/client.test.ts']
  },
  {
    why: 'a frame of ZMTP in two chunks is lost',
    file: 'src/wire/trainers/zmtp.ts',
    before: `    if (this.#have < headerBytes + length) return false
`,
    after: '',
    tests: ['test/wire/trainers/zmtp.test.ts']
  },
  {
    why: 'long frames of ZMTP are read with a length of one byte',
    file: 'src/wire/trainers/zmtp.ts',
    before: 'head.readUInt32BE(1) * 2 ** 32 + head.readUInt32BE(5)',
    after: 'head.readUInt32BE(1)',
    tests: ['test/wire/trainers/zmtp.test.ts']
  }
]
