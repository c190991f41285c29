import type { Mutant } from './mutant.ts'

export const model: readonly Mutant[] = [
  {
    why: 'llama3 RoPE ignores low_freq_factor',
    file: 'src/model/rope.ts',
    before: 'if (wavelength > original / low) return f / factor',
    after: 'if (wavelength > original) return f / factor',
    tests: ['test/model/rope.test.ts']
  },
  {
    why: 'llama3 RoPE blends as if low_freq_factor were 1',
    file: 'src/model/rope.ts',
    before: '(original / wavelength - low) / (high - low)',
    after: '(original / wavelength - 1) / (high - 1)',
    tests: ['test/model/rope.test.ts']
  },
  {
    why: "yarn's bounds are never whole numbers",
    file: 'src/model/rope.ts',
    before: `low = Math.floor(low)
    high = Math.ceil(high)`,
    after: `low = Math.ceil(low)
    high = Math.floor(high)`,
    tests: ['test/model/rope.test.ts']
  },
  {
    why: 'KV heads that several ranks hold are those of the wrong rank',
    file: 'src/model/slices.ts',
    before: 'srcRow: Math.floor(rank / replicas) * shard',
    after: 'srcRow: Math.floor(rank % replicas) * shard',
    tests: ['test/model/model-table.test.ts', 'test/model/families.test.ts']
  },
  {
    why: 'columns of the second rank begin at the first',
    file: 'src/model/slices.ts',
    before: 'srcCol: rank * shard, rows, cols: shard',
    after: 'srcCol: 0, rows, cols: shard',
    tests: ['test/model/model-table.test.ts']
  },
  {
    why: 'the rows of the last rank of a padded vocabulary pass its end',
    file: 'src/model/slices.ts',
    before: 'rows: Math.min(shard, rows - rank * shard),',
    after: 'rows: shard,',
    tests: ['test/model/model-table.test.ts']
  },
  {
    why: 'fused experts of the second rank are written over the first',
    file: 'src/model/slices.ts',
    before: 'srcRow: block * size + rank * shard,',
    after: 'srcRow: block * size,',
    tests: ['test/model/model-table.test.ts', 'test/weights/weight-store.test.ts']
  },
  {
    why: 'up and gate of an expert change places',
    file: 'src/model/tensor-table.ts',
    before: 'rowShards(ranks, { param: w13, dstRow: gate + expertIntermediate })',
    after: 'rowShards(ranks, { param: w13, dstRow: gate })',
    tests: ['test/model/model-table.test.ts', 'test/weights/weight-store.test.ts']
  },
  {
    why: 'the rows of v begin at those of k',
    file: 'src/model/tensor-table.ts',
    before: 'dstRow: kvRow + local.kvHeads * headDim, replicas',
    after: 'dstRow: kvRow, replicas',
    tests: ['test/model/model-table.test.ts', 'test/weights/weight-store.test.ts']
  },
  {
    why: 'a vocabulary is padded for one rank',
    file: 'src/model/rank-sizes.ts',
    before: `  while (multiple % ranks !== 0) multiple += VOCAB_MULTIPLE
`,
    after: '',
    tests: ['test/model/model-table.test.ts', 'test/model/parse-config.test.ts']
  },
  {
    why: 'every layer of a sparse step is sparse',
    file: 'src/model/expert-config.ts',
    before: '!dense.has(i) && (i + 1) % step === 0 ? 1 : 0',
    after: '!dense.has(i) ? 1 : 0',
    tests: ['test/model/parse-config.test.ts', 'test/model/goldens.test.ts']
  },
  {
    why: 'a head dimension is derived although the config names it',
    file: 'src/model/attention-config.ts',
    before: "const headDim = fields.int('head_dim', 1, 4096, family.headDim ?? hiddenSize / heads)",
    after: 'const headDim = family.headDim ?? hiddenSize / heads',
    tests: ['test/model/parse-config.test.ts', 'test/model/goldens.test.ts']
  },
  {
    why: 'a piece of a checkpoint is cut inside a row',
    file: 'src/model/checkpoint-layout.ts',
    before: 'Math.max(1, Math.floor(room / width))',
    after: 'Math.max(1, Math.ceil(room / width))',
    tests: ['test/model/checkpoint-layout.test.ts']
  }
]
