import { availableParallelism } from 'node:os'
import { basename, dirname, resolve } from 'node:path'
import { RefitError } from '../errors.ts'
import type { Architecture } from '../model/architecture.ts'
import { buildModelTable } from '../model/model-table.ts'
import { toNativeArch } from '../model/native-arch.ts'
import { readArchitecture } from '../model/read-config.ts'
import { DTYPE_BYTES, native } from '../native.ts'
// The one file of this folder that joins engine, weights and a source: the engine itself knows no way in.
// eslint-disable-next-line @typescript-eslint/no-restricted-imports
import { openDiskSource } from '../sources/disk.ts'
import type { WeightSource, WriteReport } from '../weights/source.ts'
import { WeightStore } from '../weights/weight-store.ts'
import type { EngineOptions } from './engine-options.ts'
import { kvPages } from './kv-budget.ts'
import { LocalEngine } from './local-engine.ts'
import type { WorkerData } from './messages.ts'
import { SchedulerClient } from './scheduler-client.ts'

export type { EngineOptions } from './engine-options.ts'

/** Loads the model of a folder (config.json and safetensors files) and starts an engine for it. `close` it to end its threads. */
export async function createEngine (modelPath: string, options: EngineOptions = {}): Promise<LocalEngine> {
  const arch = await readArchitecture(modelPath)
  const source = await openDiskSource(modelPath, { roots: options.modelRoots ?? ownRoots(modelPath) })
  try {
    return await start(modelPath, arch, source, options)
  } finally {
    await source.close()
  }
}

async function start (modelPath: string, arch: Architecture, source: WeightSource, options: EngineOptions): Promise<LocalEngine> {
  const { servedModelName = modelPath, weightVersion = 'default', tp: ranks = 1, pageSize = 16, maxRunningRequests = 64, maxQueuedRequests = 4096 } = options
  const dtype = options.dtype === undefined || options.dtype === 'auto' ? (arch.dtype === 'float32' ? 'float32' : 'bfloat16') : options.dtype
  const threads = options.threads ?? availableParallelism()
  const wantedContext = contextOf(arch, options)
  const table = buildModelTable(arch, ranks)
  // Loaded here first: were the worker the only one to hold it, it would be unloaded under living threads when the worker ends.
  const addon = native()
  const pages = kvPages(arch, {
    ranks,
    elementBytes: DTYPE_BYTES[dtype],
    pageSize,
    contextLength: wantedContext,
    maxRunningRequests,
    maxTotalTokens: options.maxTotalTokens ?? null,
    memFraction: options.memFraction ?? null,
    availableBytes: process.availableMemory(),
    weightBytes: table.params.reduce((sum, { rows, cols }) => sum + rows * cols, 0) * ranks * DTYPE_BYTES[dtype]
  })
  const contextLength = Math.min(wantedContext, pages * pageSize)
  const data: WorkerData = {
    core: { device: 'cpu', ranks, threads, dtype, arch: toNativeArch(arch), params: table.params, pages, pageSize, ...options.isa === undefined ? {} : { isa: options.isa } },
    scheduler: {
      contextLength,
      vocabSize: arch.vocabSize,
      eosTokenIds: arch.eosTokenIds,
      maxRunningRequests,
      maxQueuedRequests,
      maxBatchTokens: options.maxPrefillTokens ?? 512,
      epoch: 0,
      version: weightVersion,
      torn: 'no weights have been loaded'
    },
    randomSeed: options.randomSeed === undefined ? null : BigInt(options.randomSeed)
  }
  const scheduler = await SchedulerClient.start(data, options.onFailure === undefined ? {} : { onFailure: options.onFailure })
  try {
    const { core } = scheduler
    const store = new WeightStore({ addon, core, table, dtype, gates: scheduler, version: weightVersion, ...options.updateDeadlineMs === undefined ? {} : { deadlineMs: options.updateDeadlineMs } })
    const loadReport = await load(store, source, options.onProgress)
    const native = addon.coreInfo(core)
    return new LocalEngine({
      modelPath,
      servedModelName,
      architecture: arch.name,
      modelType: arch.modelType,
      vocabSize: arch.vocabSize,
      contextLength,
      eosTokenIds: arch.eosTokenIds,
      device: 'cpu',
      isa: native.isa,
      ranks,
      threads: native.threads,
      dtype,
      weightBytes: native.weightBytes,
      kvBytes: native.kvBytes,
      kvTokens: pages * pageSize,
      maxRunningRequests,
      maxQueuedRequests
    }, scheduler, store, loadReport)
  } catch (error) {
    await scheduler.close()
    throw error
  }
}

/** The first update: every tensor of the model must come with it. */
async function load (store: WeightStore, source: WeightSource, onProgress: EngineOptions['onProgress']): Promise<WriteReport> {
  const update = await store.update()
  try {
    const report = await update.write(source, onProgress)
    await update.commit({ requireAll: true })
    return report
  } catch (error) {
    await update.abort('the model could not be loaded')
    throw error
  }
}

function contextOf (arch: Architecture, { contextLength }: EngineOptions): number {
  if (contextLength === undefined) return arch.contextLength
  if (contextLength > arch.contextLength) {
    throw new RefitError('CONFIG', `--context-length: ${contextLength} tokens are more than the model's ${arch.contextLength} (max_position_embeddings of config.json)`, { param: 'context-length' })
  }
  return contextLength
}

/** The model's folder. In a Hugging Face cache, its files are links from snapshots/<revision> to blobs beside it. */
function ownRoots (modelPath: string): string[] {
  const folder = resolve(modelPath)
  const snapshots = dirname(folder)
  return basename(snapshots) === 'snapshots' ? [folder, dirname(snapshots)] : [folder]
}
