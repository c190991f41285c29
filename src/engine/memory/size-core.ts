import { availableParallelism } from 'node:os'
import { errorMessage, RefitError } from '../../errors.ts'
import type { Architecture, ModelTable } from '../../model/architecture.ts'
import { weightBytes } from '../../model/checkpoint-layout.ts'
import { heldDType } from '../../model/model-table.ts'
import { bytesOf } from '../../native/dtypes.ts'
import type { HeldDType } from '../../native/dtypes.ts'
import type { NativeAddon } from '../../native/addon.ts'
import type { CoreConfig } from '../../native/core-config.ts'
import type { CudaGpu, CudaGpus, CudaMemoryNeeds } from '../../native/devices.ts'
import { availableMemory } from './available-memory.ts'
import { chooseGpus, firstGpu, fullest } from './choose-gpus.ts'
import type { EngineOptions } from '../engine-options.ts'
import { recordedBytes, recordedLayout } from '../expert-layout.ts'
import { kvBytesPerToken, kvPages } from './kv-budget.ts'
import type { KvBudgetOptions } from './kv-budget.ts'
import { probeGpus } from './probe-gpus.ts'
import type { ExpertLayout } from '../../contract/rollout-engine.ts'
import { stepTokens } from '../step-device.ts'

/** The configuration of the core and its scheduler. */
export interface CoreSize {
  core: CoreConfig
  contextLength: number
  maxRunningRequests: number
  maxBatchTokens: number
  /** The GPU of each rank; empty on the CPU. */
  gpus: CudaGpu[]
  /** All GPUs of the machine. */
  visible: CudaGpu[]
  /** Null if no experts are recorded. */
  experts: ExpertLayout | null
}

/** Defaults of --mem-fraction. */
export const MEM_FRACTION = { cpu: 0.5, cuda: 0.85 }
const DEFAULTS = {
  cpu: { maxRunningRequests: 64, maxBatchTokens: 512 },
  // Scratch memory grows with the tokens of a step; 4096 of them keep a GPU busy. Experts are read once per step, so a
  // prefill of 8192 took 7 % less time per token on an H200.
  cuda: { maxRunningRequests: 512, maxBatchTokens: 4096, ampleBytes: 100e9, ampleBatchTokens: 8192 }
}
const PAGE_SIZE = 16
/** About how long a slice of a write beside steps takes: a load of an adapter waits for one. */
const SLICE_MS = 5
const LEAST_SLICE_BYTES = 1 << 20
/** Bytes per second of a write: on CPUs, and on GPUs with --shadow-rate 0. */
const RATES = { cpu: 1e10, cuda: 1e12 }
/** Default of --shadow-rate. */
const SHADOW_RATE = 100
/** The rank's own watchdog fires first, because its message has more details. */
const RANK_WATCHDOG_SHARE = 0.9

/** Chooses the device and sizes its memory. Throws CONFIG if model, options and device do not fit together. */
export async function sizeCore (
  arch: Architecture,
  table: ModelTable,
  options: EngineOptions,
  addon: Pick<NativeAddon, 'cudaMemoryNeeds'>,
  probe = probeGpus
): Promise<CoreSize> {
  const first = firstGpu(options.device ?? 'cpu', options.baseGpuId ?? null)
  return first === null ? planCpu(arch, table, options) : await planCuda(arch, table, options, addon, first, probe)
}

/** The dtype that an engine computes in, and holds its parameters in. */
export function engineDType (arch: Architecture, { device = 'cpu', dtype = 'auto' }: EngineOptions): HeldDType {
  if (dtype !== 'auto') return dtype
  return device === 'cpu' ? heldDType(arch) : 'bfloat16'
}

function planCpu (arch: Architecture, table: ModelTable, options: EngineOptions): CoreSize {
  if (options.dtype === 'float16') {
    throw new RefitError(
      'CONFIG',
      '--dtype float16: CPUs compute in bfloat16 or float32; leave --dtype out (weights are converted as they are ' +
        'loaded), or use --device cuda',
      { param: 'dtype' }
    )
  }
  const {
    maxRunningRequests = DEFAULTS.cpu.maxRunningRequests,
    maxPrefillTokens: maxBatchTokens = DEFAULTS.cpu.maxBatchTokens,
    pageSize = PAGE_SIZE
  } = options
  const dtype = engineDType(arch, options)
  const wanted = contextOf(arch, options)
  const experts = expertsOf(arch, options)
  const available = availableMemory()
  const spareBytes = shadowBytes(table, options, available)
  const pages = kvPages({
    ...budget(options, MEM_FRACTION.cpu),
    pageBytes: (kvBytesPerToken(arch, table.ranks, bytesOf(dtype)) + recordedBytes(experts)) * pageSize,
    contextLength: wanted,
    maxRunningRequests,
    availableBytes: available,
    where: 'free memory',
    weightBytes: weightBytes(table),
    otherBytes: 0,
    spareBytes
  })
  const core: CoreConfig = {
    device: 'cpu',
    ...common(arch, table, options),
    dtype,
    pages,
    pageSize,
    ...options.isa === undefined ? {} : { isa: options.isa },
    ...options.shadowWeights === true ? { sets: 2 } : {}
  }
  return {
    core,
    contextLength: Math.min(wanted, pages * pageSize),
    maxRunningRequests,
    maxBatchTokens,
    gpus: [],
    visible: [],
    experts
  }
}

async function planCuda (
  arch: Architecture,
  table: ModelTable,
  options: EngineOptions,
  addon: Pick<NativeAddon, 'cudaMemoryNeeds'>,
  first: number,
  probe: () => Promise<CudaGpus>
): Promise<CoreSize> {
  if (options.dtype === 'float32') {
    throw new RefitError(
      'CONFIG',
      '--dtype float32: GPUs compute in bfloat16 or float16; leave --dtype out (weights are converted as they are ' +
        'loaded), or use --device cpu',
      { param: 'dtype' }
    )
  }
  const dtype = engineDType(arch, options)
  const experts = expertsOf(arch, options)
  const found = await probe()
  const gpus = chooseGpus(found, first, table.ranks, process.env.REFIT_CUDA_SHARE_CARD === '1')
  const ample = arch.experts > 0 && gpus.every(gpu => gpu.totalBytes > DEFAULTS.cuda.ampleBytes)
  const {
    maxRunningRequests = DEFAULTS.cuda.maxRunningRequests,
    maxPrefillTokens: maxBatchTokens = ample ? DEFAULTS.cuda.ampleBatchTokens : DEFAULTS.cuda.maxBatchTokens,
    pageSize = PAGE_SIZE
  } = options
  const wanted = contextOf(arch, options)
  const core: CoreConfig = {
    device: 'cuda',
    ...common(arch, table, options),
    dtype,
    pages: 1,
    pageSize,
    gpus: gpus.map(({ ordinal }) => ordinal),
    maxStepTokens: stepTokens({ maxBatchTokens, maxRunningRequests, pageSize }),
    maxStepSequences: maxRunningRequests,
    maxContext: wanted,
    ...options.disableCudaGraph === true ? { graphs: false } : {},
    ...options.shadowWeights === true ? { sets: 2, shadowRate: (options.shadowRate ?? SHADOW_RATE) * 1e9 } : {},
    ...options.watchdogMs === undefined ? {} : { watchdogSeconds: options.watchdogMs / 1000 * RANK_WATCHDOG_SHARE }
  }
  const { gpu, freeBytes } = fullest(gpus)
  const pagesBeside = ({ weightBytes, spareBytes, scratchBytes, fixedBytes }: CudaMemoryNeeds): number =>
    kvPages({
      ...budget(options, MEM_FRACTION.cuda),
      pageBytes: kvBytesPerToken(arch, table.ranks, bytesOf(dtype)) / table.ranks * pageSize,
      contextLength: wanted,
      maxRunningRequests,
      availableBytes: freeBytes,
      where: `free memory of GPU ${gpu.ordinal} (${gpu.name})`,
      weightBytes,
      spareBytes,
      otherBytes: scratchBytes + fixedBytes
    })
  // Buffers grow with the longest sequence that the pages hold. The number of pages that fit next to the buffers of one
  // page gives the largest buffers.
  const pages = pagesBeside(planMemory(addon, { ...core, pages: pagesBeside(planMemory(addon, core)) }))
  requireHostMemory(pages * pageSize * recordedBytes(experts))
  const contextLength = Math.min(wanted, pages * pageSize)
  return {
    core: { ...core, pages, maxContext: contextLength },
    contextLength,
    maxRunningRequests,
    maxBatchTokens,
    gpus,
    visible: found.gpus,
    experts
  }
}

/** Bytes of the second set of weights; the slots of adapters exist once. Throws CONFIG if both do not fit. */
function shadowBytes (table: ModelTable, { shadowWeights = false }: EngineOptions, available: number): number {
  if (!shadowWeights) return 0
  const bytes = weightBytes({ ...table, params: table.params.slice(0, table.weights) })
  const all = weightBytes(table) + bytes
  if (all <= available) return bytes
  throw new RefitError(
    'CONFIG',
    `--shadow-weights: two sets of weights take ${gigabytes(all)} (${gigabytes(bytes)} for the second), and ` +
      `${gigabytes(available)} of memory are free; leave it out, or free memory`,
    { param: 'shadow-weights' }
  )
}

function gigabytes (bytes: number): string {
  return `${(bytes / 1e9).toFixed(2)} GB`
}

function planMemory (addon: Pick<NativeAddon, 'cudaMemoryNeeds'>, core: CoreConfig): CudaMemoryNeeds {
  try {
    return addon.cudaMemoryNeeds(core)
  } catch (error) {
    throw new RefitError('CONFIG', `--device cuda: ${errorMessage(error)}`, {
      param: 'device',
      cause: error
    })
  }
}

function common (
  arch: Architecture,
  table: ModelTable,
  options: EngineOptions
): Pick<CoreConfig, 'ranks' | 'threads' | 'recipe' | 'params' | 'deterministic' | 'recordExperts' | 'adapters'> {
  return {
    ranks: table.ranks,
    threads: options.threads ?? availableParallelism(),
    recipe: arch,
    params: table.params,
    ...table.adapters === undefined ? {} : { adapters: { slots: table.adapters.slots, rank: table.adapters.rank } },
    ...options.deterministic === true ? { deterministic: true } : {},
    ...options.enableReturnRoutedExperts === true ? { recordExperts: true } : {}
  }
}

function expertsOf (arch: Architecture, { enableReturnRoutedExperts = false }: EngineOptions): ExpertLayout | null {
  return recordedLayout(arch, enableReturnRoutedExperts)
}

/**
 * KV lies on the GPUs; its recorded experts lie in host memory. That memory is allocated as pages are used and must not
 * run out then.
 */
function requireHostMemory (bytes: number): void {
  const free = availableMemory()
  if (bytes <= free) return
  throw new RefitError(
    'CONFIG',
    `--enable-return-routed-experts: the experts of all tokens of the KV cache take ${
      (bytes / 1e9).toFixed(2)
    } GB of host memory, of which ${(free / 1e9).toFixed(2)} GB are free; lower --max-total-tokens or --mem-fraction`,
    { param: 'enable-return-routed-experts' }
  )
}

function budget (
  { pageSize = PAGE_SIZE, maxTotalTokens, memFraction }: EngineOptions,
  fraction: number
): Pick<KvBudgetOptions, 'pageSize' | 'maxTotalTokens' | 'memFraction'> {
  return { pageSize, maxTotalTokens: maxTotalTokens ?? null, memFraction: memFraction ?? fraction }
}

function contextOf (arch: Architecture, { contextLength }: EngineOptions): number {
  if (contextLength === undefined) return arch.contextLength
  if (contextLength > arch.contextLength) {
    throw new RefitError(
      'CONFIG',
      `--context-length: ${contextLength} tokens are more than the model's ${arch.contextLength} ` +
        '(max_position_embeddings of config.json)',
      { param: 'context-length' }
    )
  }
  return contextLength
}

/** Bytes that a write of the second set moves at a time. */
export function sliceBytes ({ device, shadowRate = 0 }: Pick<CoreConfig, 'device' | 'shadowRate'>): number {
  const rate = shadowRate > 0 ? shadowRate : RATES[device]
  return Math.max(LEAST_SLICE_BYTES, Math.round(rate * SLICE_MS / 1000))
}
