import { basename, dirname, resolve } from 'node:path'
import { RefitError } from '../errors.ts'
import { adapterSlots } from '../adapters/adapter-options.ts'
import { AdapterStore } from '../adapters/adapter-store.ts'
import type { Architecture } from '../model/architecture.ts'
import { describeModel } from '../model/describe-model.ts'
import { buildModelTable } from '../model/model-table.ts'
import { readArchitecture } from '../model/read-config.ts'
import type { CoreInfo } from '../native/core-config.ts'
import { native } from '../native/load-addon.ts'
import { openDiskSource } from '../sources/disk/disk.ts'
import type { WeightSource, WriteReport } from '../contract/weight-source.ts'
import { WeightStore } from '../weights/weight-store.ts'
import type { WeightStoreOptions } from '../weights/weight-store.ts'
import { availableMemory } from '../engine/memory/available-memory.ts'
import type { EngineOptions } from '../engine/engine-options.ts'
import { recordedPerToken } from '../engine/expert-layout.ts'
import type { HeldWeights } from '../engine/held-weights.ts'
import { LocalEngine } from '../engine/local-engine.ts'
import type { StartData } from '../engine/messages.ts'
import { engineDType, sizeCore, sliceBytes } from '../engine/memory/size-core.ts'
import type { CoreSize } from '../engine/memory/size-core.ts'
import type { EngineInfo } from '../contract/rollout-engine.ts'
import { DRAFT_TOKENS } from '../contract/speculation.ts'
import { SchedulerClient } from '../engine/scheduler-client.ts'

export type { EngineOptions } from '../engine/engine-options.ts'

/**
 * Loads the model of a folder (config.json and safetensors files) and starts an engine for it. `close` ends its
 * threads.
 */
export async function createEngine (modelPath: string, options: EngineOptions = {}): Promise<LocalEngine> {
  const arch = await readArchitecture(modelPath)
  if (options.loadFrom !== undefined) return await start(modelPath, arch, null, options)
  const source = await inFolder(
    modelPath,
    async () => await openDiskSource(modelPath, { roots: options.modelRoots ?? ownRoots(modelPath) })
  )
  try {
    return await start(modelPath, arch, source, options)
  } finally {
    await source.close()
  }
}

/** Without a source, the weights come from the engine that `loadFrom` names. */
async function start (
  modelPath: string,
  arch: Architecture,
  source: WeightSource | null,
  options: EngineOptions
): Promise<LocalEngine> {
  const { servedModelName = modelPath, weightVersion = 'default', maxQueuedRequests = 4096 } = options
  const adapters = adapterSlots(options)
  const dtype = engineDType(arch, options)
  const table = buildModelTable(arch, options.tp ?? 1, dtype, adapters?.slots, options.deterministic)
  // Load the addon here first. If only the worker held it, it would be unloaded under running threads when the worker
  // ends.
  const addon = native()
  const sizes = await sizeCore(arch, table, options, addon)
  const { core: config, contextLength, maxRunningRequests, maxBatchTokens, experts } = sizes
  const limits = { contextLength, maxRunningRequests, maxQueuedRequests }
  const drafts = draftTokens(options)
  const data: StartData = {
    core: config,
    scheduler: {
      ...limits,
      vocabSize: arch.vocabSize,
      eosTokenIds: arch.eosTokenIds,
      maxBatchTokens,
      overlap: options.disableOverlapSchedule !== true,
      ...drafts === undefined ? {} : { drafts, fixedDraftCost: options.disableAdaptiveSpeculation === true },
      recorded: recordedPerToken(experts),
      epoch: 0,
      version: weightVersion,
      torn: 'no weights have been loaded'
    },
    vocabulary: options.vocabulary ?? null,
    randomSeed: options.randomSeed === undefined ? null : BigInt(options.randomSeed)
  }
  const scheduler = await startScheduler(data, options)
  try {
    const { core } = scheduler
    const store = weightStore({ addon, core, table, gates: scheduler }, sizes, options)
    const info: EngineInfo = {
      modelPath,
      servedModelName,
      ...limits,
      ...infoOf(arch, sizes, addon.coreInfo(core), options),
      ...drafts === undefined ? {} : { speculative: { draftTokens: drafts } }
    }
    const held: HeldWeights = { store, model: describeModel(arch), device: config.device }
    const loadReport = source === null
      ? await loadFromOther({ ...held, info }, options)
      : await inFolder(modelPath, async () => await load(store, source, options.onProgress))
    store.shadow?.meter.start()
    const times = {
      settle: async (): Promise<void> => {
        await scheduler.settle()
      },
      lull: async (): Promise<void> => {
        await scheduler.lull.next()
      }
    }
    const loras = adapters === null
      ? null
      : new AdapterStore({ weights: store, limits: adapters.limits, keepWeights: info.weightsCpuBackup, ...times })
    return new LocalEngine(info, scheduler, store, { loadReport, held, adapters: loras })
  } catch (error) {
    await scheduler.close()
    throw error
  }
}

function infoOf (
  arch: Architecture,
  { core: config, gpus, visible, experts }: CoreSize,
  { isa, threads, weightBytes, kvBytes }: CoreInfo,
  options: EngineOptions
): Omit<EngineInfo, 'modelPath' | 'servedModelName' | 'contextLength' | 'maxRunningRequests' | 'maxQueuedRequests'> {
  return {
    architecture: arch.name,
    modelType: arch.modelType,
    vocabSize: arch.vocabSize,
    eosTokenIds: arch.eosTokenIds,
    device: config.device,
    gpus: gpus.map(({ ordinal, uuid, name, totalBytes }) => ({ ordinal, uuid, name, totalBytes })),
    ...visible.length === 0 ? {} : { visibleGpus: visible.map(({ ordinal, uuid }) => ({ ordinal, uuid })) },
    isa,
    ranks: config.ranks,
    threads,
    dtype: config.dtype,
    weightBytes,
    kvBytes,
    kvTokens: config.pages * config.pageSize,
    pageSize: config.pageSize,
    weightsCpuBackup: options.enableWeightsCpuBackup ?? false,
    deterministic: config.device === 'cpu' || config.deterministic === true,
    deterministicAcrossRanks: config.deterministic === true || (config.device === 'cpu' && config.ranks === 1),
    ...options.dataParallel === undefined ? {} : { dataParallel: options.dataParallel },
    ...experts === null ? {} : { experts }
  }
}

function weightStore (
  parts: Pick<WeightStoreOptions, 'addon' | 'core' | 'table' | 'gates'>,
  { core, gpus }: CoreSize,
  {
    weightVersion = 'default',
    updateDeadlineMs,
    enableWeightsCpuBackup = false,
    shadowWeights = false,
    oldWeightsTimeoutMs: oldTimeoutMs
  }: EngineOptions
): WeightStore {
  const { dtype, device } = core
  return new WeightStore({
    ...parts,
    dtype,
    version: weightVersion,
    keepWeights: enableWeightsCpuBackup,
    availableBytes: availableMemory,
    onHost: device === 'cpu',
    shadow: shadowWeights,
    sliceBytes: sliceBytes(core),
    releasable: gpus.every(({ virtualMemory }) => virtualMemory),
    ...updateDeadlineMs === undefined ? {} : { deadlineMs: updateDeadlineMs },
    ...oldTimeoutMs === undefined ? {} : { oldTimeoutMs }
  })
}

/** Most guessed tokens of a request in one step; undefined if nothing is guessed. */
function draftTokens (
  { speculative = 'off', speculativeNumDraftTokens: tokens = DRAFT_TOKENS }: EngineOptions
): number | undefined {
  if (!['off', 'siblings'].includes(speculative)) {
    throw new RefitError('CONFIG', `speculative: expected "off" or "siblings", got ${JSON.stringify(speculative)}`)
  }
  if (!Number.isInteger(tokens) || tokens < 1) {
    throw new RefitError('CONFIG', `speculativeNumDraftTokens: expected a whole number from 1, got ${tokens}`)
  }
  return speculative === 'siblings' ? tokens : undefined
}

async function startScheduler (
  data: StartData,
  { onFailure, watchdogMs }: EngineOptions
): Promise<SchedulerClient> {
  return await SchedulerClient.start(data, {
    ...onFailure === undefined ? {} : { onFailure },
    ...watchdogMs === undefined ? {} : { watchdogMs }
  })
}

async function loadFromOther (own: HeldWeights & { info: EngineInfo }, options: EngineOptions): Promise<WriteReport> {
  const { updateDeadlineMs: timeoutMs, onProgress, loadFrom } = options
  // It has an HTTP client, which takes long to import.
  const { loadFromPeer } = await import('../peer/load-from-peer.ts')
  const { report } = await loadFromPeer(own, { timeoutMs, onProgress, ...loadFrom! })
  return report
}

/** The first update: it requires every tensor of the model. */
async function load (
  store: WeightStore,
  source: WeightSource,
  onProgress: EngineOptions['onProgress']
): Promise<WriteReport> {
  const update = await store.update({ swap: 'in_place' })
  try {
    const report = await update.write(source, onProgress)
    await update.commit({ requireAll: true })
    return report
  } catch (error) {
    await update.abort('the model could not be loaded')
    throw error
  }
}

/** Errors about a checkpoint name the folder that it lies in. */
async function inFolder<T> (folder: string, read: () => Promise<T>): Promise<T> {
  try {
    return await read()
  } catch (error) {
    if (
      !(error instanceof RefitError) || !/^(CHECKPOINT|WEIGHTS)_/.test(error.code) ||
      error.message.includes(resolve(folder))
    ) throw error
    throw new RefitError(error.code, `${folder}: ${error.message}`, {
      cause: error,
      ...error.param === undefined ? {} : { param: error.param }
    })
  }
}

/** The model's folder. In a Hugging Face cache, its files are links from snapshots/<revision> to blobs beside it. */
function ownRoots (modelPath: string): string[] {
  const folder = resolve(modelPath)
  const snapshots = dirname(folder)
  return basename(snapshots) === 'snapshots' ? [folder, dirname(snapshots)] : [folder]
}
