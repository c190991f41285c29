import t from 'tap'
import { availableMemory } from '../../src/engine/memory/available-memory.ts'
import type { EngineOptions } from '../../src/engine/engine-options.ts'
import { sizeCore, sliceBytes } from '../../src/engine/memory/size-core.ts'
import type { CoreSize } from '../../src/engine/memory/size-core.ts'
import { buildModelTable } from '../../src/model/model-table.ts'
import type { CoreConfig } from '../../src/native/core-config.ts'
import type { CudaGpu, CudaGpus } from '../../src/native/devices.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'

// Memory sizes for each device. GPUs are only described here; none is used.

const ARCH = tinyArchitecture('Qwen3ForCausalLM')
/** 2 layers, K and V, one KV head of 32 in bf16 on each of two ranks, 16 tokens. */
const PAGE = 2 * 2 * 1 * 32 * 2 * 16
const MEMORY = { weightBytes: 5e6, spareBytes: 0, kvBytes: PAGE, scratchBytes: 2e6, fixedBytes: 1e6 }

const gpu = (ordinal: number, freeBytes: number): CudaGpu => ({
  ordinal,
  name: 'NVIDIA H200',
  uuid: `GPU-${ordinal}`,
  pciBusId: '',
  computeCapability: '9.0',
  multiprocessors: 132,
  totalBytes: 150e9,
  freeBytes,
  virtualMemory: true,
  integrated: false
})
const found = (...free: number[]): () => Promise<CudaGpus> => async () => ({
  driverCuda: '13.0',
  runtimeCuda: '13.0',
  driverVersion: '580',
  architectures: '90',
  gpus: free.map((bytes, i) => gpu(i, bytes)),
  peerAccess: [],
  libraries: []
})

function addon () {
  const requested: CoreConfig[] = []
  return {
    requested,
    cudaMemoryNeeds: (config: CoreConfig) => {
      requested.push(config)
      return MEMORY
    }
  }
}

t.test('GPUs with more than 100 GB compute 8192 tokens of a model with experts in a step', async (t) => {
  const sparse = tinyArchitecture('Qwen3MoeForCausalLM')
  const small = async (): Promise<CudaGpus> => {
    const gpus = await found(40e6, 30e6)()
    return { ...gpus, gpus: gpus.gpus.map((gpu, i) => ({ ...gpu, totalBytes: i === 1 ? 80e9 : 150e9 })) }
  }
  const plan = (tp: number): Promise<CoreSize> =>
    sizeCore(sparse, buildModelTable(sparse, tp), { device: 'cuda', tp }, addon(), small)
  t.equal((await plan(2)).maxBatchTokens, 4096)
  t.equal((await plan(1)).maxBatchTokens, 8192)
})

t.test('GPUs: the KV cache has the room that the fullest one has next to weights and buffers', async (t) => {
  const native = addon()
  const plan = await sizeCore(ARCH, buildModelTable(ARCH, 2), { device: 'cuda:1', tp: 2 }, native, found(1, 40e6, 30e6))
  t.same(plan.core.gpus, [1, 2])
  t.same(plan.gpus.map(({ uuid }) => uuid), ['GPU-1', 'GPU-2'])
  t.equal(plan.core.pages, Math.floor((0.85 * 30e6 - 8e6) / PAGE))
  t.match(plan.core, {
    device: 'cuda',
    dtype: 'bfloat16',
    ranks: 2,
    maxStepTokens: 4096,
    maxStepSequences: 512,
    maxContext: 512,
    pageSize: 16
  })
  t.match(plan, { maxRunningRequests: 512, maxBatchTokens: 4096, contextLength: 512 })
  t.same(
    native.requested.map(({ pages }) => pages),
    [1, plan.core.pages],
    'the size of buffers is computed with the final number of pages'
  )
  t.equal(plan.core.watchdogSeconds, undefined)
  t.equal(plan.core.graphs, undefined)
  t.equal(plan.core.deterministic, undefined)
})

t.test('GPUs: the KV cache has no more than running requests need, or exactly the requested size', async (t) => {
  const table = buildModelTable(ARCH, 1)
  const wide = await sizeCore(
    ARCH,
    table,
    {
      device: 'cuda',
      maxRunningRequests: 3,
      maxPrefillTokens: 16,
      watchdogMs: 10_000,
      disableCudaGraph: true,
      deterministic: true
    },
    addon(),
    found(1e9)
  )
  t.equal(wide.core.pages, 3 * 512 / 16)
  t.match(wide.core, { maxStepTokens: 19, maxStepSequences: 3, watchdogSeconds: 9, gpus: [0], graphs: false })
  t.equal(wide.core.deterministic, true)
  const small = await sizeCore(
    ARCH,
    table,
    { device: 'cuda', baseGpuId: 1, maxTotalTokens: 100 },
    addon(),
    found(1, 1e9)
  )
  t.equal(small.core.pages, 6)
  t.match(small, { contextLength: 96, core: { maxContext: 96, gpus: [1] } })
})

t.test('GPUs: a full GPU is refused with its numbers', async (t) => {
  await t.rejects(sizeCore(ARCH, buildModelTable(ARCH, 1), { device: 'cuda' }, addon(), found(9e6)), {
    code: 'CONFIG',
    message:
      /0\.85 of 9\.0 MB free memory of GPU 0 \(NVIDIA H200\) holds no KV cache beside 5\.0 MB of weights and 3\.0/
  })
})

t.test('GPUs: buffers that grow with the longest sequence always have room', async (t) => {
  const arch = tinyArchitecture('Qwen3ForCausalLM', { max_position_embeddings: 1_000_000 })
  // The RoPE table, and partial results of attention beyond short sequences.
  const cudaMemoryNeeds = ({ pages, pageSize, maxContext }: CoreConfig) => {
    const context = Math.min(pages * pageSize, maxContext!)
    return { ...MEMORY, fixedBytes: 1e6 + context * 32 * 4, scratchBytes: context > 512 ? 6e6 : 2e6 }
  }
  for (
    const [free, options] of [
      [30e6, {}],
      [300e6, {}],
      [3e9, { maxRunningRequests: 2 }],
      [30e6, { memFraction: 0.95 }],
      [9.5e6, {}]
    ] as const
  ) {
    const { core, contextLength } = await sizeCore(arch, buildModelTable(arch, 1), { device: 'cuda', ...options }, {
      cudaMemoryNeeds
    }, found(free))
    const { weightBytes, scratchBytes, fixedBytes } = cudaMemoryNeeds(core)
    const taken = weightBytes + scratchBytes + fixedBytes + core.pages * 2 * PAGE
    const share = ('memFraction' in options ? options.memFraction : 0.85) * free
    t.ok(taken <= share, `${taken} of ${share} bytes with ${core.pages} pages`)
    t.equal(core.maxContext, contextLength)
  }
})

t.test('GPUs: a model that they cannot compute is refused with a message, as a wrong option is', async (t) => {
  const cudaMemoryNeeds = (): never => {
    throw new Error('bad configuration: head_dim 4 is not a multiple of 8 up to 256, which GPUs need')
  }
  await t.rejects(sizeCore(ARCH, buildModelTable(ARCH, 1), { device: 'cuda' }, { cudaMemoryNeeds }, found(1e9)), {
    code: 'CONFIG',
    param: 'device',
    message: '--device cuda: bad configuration: head_dim 4 is not a multiple of 8 up to 256, which GPUs need'
  })
})

t.test('a second set of weights is refused with its numbers where it does not fit', async (t) => {
  const table = buildModelTable(ARCH, 1)
  const cpu = async (bytes: number, options: EngineOptions): Promise<CoreSize> => {
    const params = [{ name: 'huge', rows: Math.ceil(bytes / 2), cols: 1, dtype: 'bfloat16' as const }]
    return await sizeCore(ARCH, { ...table, params, weights: 1 }, options, addon())
  }
  const available = availableMemory()
  const shadow = { shadowWeights: true, maxTotalTokens: 64 }
  t.equal((await cpu(1e6, shadow)).core.sets, 2)
  t.equal((await cpu(1e6, {})).core.sets, undefined)
  await t.rejects(cpu(available * 0.8, shadow), {
    code: 'CONFIG',
    message: /^--shadow-weights: two sets of weights take \d+\.\d\d GB \(\d+\.\d\d GB for the second\), and .* free/
  })
  t.ok(await cpu(available * 0.2, { memFraction: 0.3 }))
  await t.rejects(cpu(available * 0.2, { memFraction: 0.3, shadowWeights: true }), {
    code: 'CONFIG',
    message: /^--mem-fraction: 0.3 of .* of weights, \d+\.\d MB of --shadow-weights \(a page/
  })
  const spare = {
    cudaMemoryNeeds: ({ sets = 1 }: CoreConfig) => ({ ...MEMORY, spareBytes: 5e6 * (sets - 1) })
  }
  const cuda = { device: 'cuda', memFraction: 0.5 } as const
  t.match((await sizeCore(ARCH, table, { ...cuda, shadowWeights: true }, spare, found(40e6))).core, {
    sets: 2,
    shadowRate: 100e9
  })
  t.match((await sizeCore(ARCH, table, { ...cuda, shadowWeights: true, shadowRate: 0 }, spare, found(40e6))).core, {
    shadowRate: 0
  })
  t.notOk((await sizeCore(ARCH, table, cuda, spare, found(20e6))).core.sets)
  await t.rejects(sizeCore(ARCH, table, { ...cuda, shadowWeights: true }, spare, found(20e6)), {
    code: 'CONFIG',
    message: /^--mem-fraction: 0.5 of .* 5.0 MB of weights, 5.0 MB of --shadow-weights and 3.0 MB of buffers/
  })
})

t.test('a checkpoint in float32 computes in bfloat16 on GPUs and in float32 on a CPU', async (t) => {
  const arch = tinyArchitecture('Qwen3ForCausalLM', { dtype: 'float32' })
  const table = buildModelTable(arch, 1)
  t.equal((await sizeCore(arch, table, { device: 'cuda' }, addon(), found(1e9))).core.dtype, 'bfloat16')
  const cpu = await sizeCore(arch, table, { threads: 3 }, addon(), () => t.fail('no GPU is looked for') as never)
  t.match(cpu, {
    maxRunningRequests: 64,
    maxBatchTokens: 512,
    gpus: [],
    core: { device: 'cpu', dtype: 'float32', threads: 3, ranks: 1 }
  })
})

t.test('--dtype float16 is for GPUs, in the bytes of bfloat16', async (t) => {
  const arch = tinyArchitecture('Qwen3ForCausalLM', { dtype: 'float16' })
  const table = buildModelTable(arch, 1, 'float16')
  const seen: string[] = []
  const counting = addon()
  const core = (dtype?: 'float16'): ReturnType<typeof sizeCore> =>
    sizeCore(arch, table, { device: 'cuda', ...dtype === undefined ? {} : { dtype } }, {
      cudaMemoryNeeds: config => {
        seen.push(config.dtype)
        return counting.cudaMemoryNeeds(config)
      }
    }, found(1e9))
  const [half, auto] = [await core('float16'), await core()]
  t.equal(half.core.dtype, 'float16')
  t.equal(auto.core.dtype, 'bfloat16', 'also if the checkpoint is float16')
  t.equal(half.core.pages, auto.core.pages)
  t.same(new Set(seen), new Set(['float16', 'bfloat16']), 'each library counts for itself')
  await t.rejects(sizeCore(arch, table, { dtype: 'float16' }, addon(), () => t.fail('no GPU is looked for') as never), {
    code: 'CONFIG',
    message: /^--dtype float16: CPUs compute in bfloat16 or float32; leave --dtype out .*or use --device cuda/
  })
})

t.test('the page cache of a limited group counts as available, as far as the machine has the memory', async (t) => {
  const stat = 'anon 5\ninactive_file 300\nactive_file 40\nfile 900\n'
  t.equal(availableMemory(100, 1000, stat), 440)
  t.equal(availableMemory(100, 200, stat), 200)
  t.equal(availableMemory(100, 50, stat), 100)
  t.equal(availableMemory(100, 1000, ''), 100)
  t.equal(
    availableMemory(100, 1000, 'inactive_file 1\nactive_file 2\ntotal_inactive_file 30\ntotal_active_file 40\n'),
    170,
    'the older hierarchy'
  )
  t.ok(availableMemory() > 0)
})

t.test('a slice of a write beside steps takes some milliseconds at any rate', async t => {
  t.equal(sliceBytes({ device: 'cuda', shadowRate: 100e9 }), 500e6)
  t.equal(sliceBytes({ device: 'cuda', shadowRate: 1e9 }), 5e6)
  t.equal(sliceBytes({ device: 'cuda', shadowRate: 1e6 }), 1 << 20)
  t.equal(sliceBytes({ device: 'cuda', shadowRate: 0 }), 5e9)
  t.equal(sliceBytes({ device: 'cpu' }), 50e6)
})
