import { checkpointDType } from '../app/checkpoint-dtype.ts'
import { chooseDialects } from '../app/dialects.ts'
import { createEngine } from '../app/create-engine.ts'
import type { EngineOptions } from '../app/create-engine.ts'
import { buildServer } from '../app/server.ts'
import { redact } from '../config/redact.ts'
import type { ResolvedModel } from '../config/resolve-model.ts'
import type { Config } from '../config/schema.ts'
import type { DataParallel, RolloutEngine } from '../contract/rollout-engine.ts'
import { endProcess } from '../engine/end-process.ts'
import { collectOldGarbageLess } from '../engine/old-garbage.ts'
import { RefitError } from '../errors.ts'
import { replyParsers } from '../text/reply-parsers.ts'
import { loadTokenizer } from '../text/tokenizer.ts'
import type { Tokenizer } from '../text/tokenizer.ts'
import { listenError } from './check-port.ts'
import { endOnFailure } from './end-on-failure.ts'
import { LoadProgress } from './load-progress.ts'
import type { Log } from './log.ts'
import { openTelemetry } from './open-telemetry.ts'
import { shutDown } from './shut-down.ts'
import { startAdapters } from '../app/start-adapters.ts'
import { parseAdapters } from './parse-adapters.ts'
import { logStats } from './stats-line.ts'
import { loadWeightLoaders } from './weight-loaders.ts'

export interface ServerParts {
  config: Config
  model: ResolvedModel
  log: Log
  /** Set for one of several engines behind one port. */
  place?: DataParallel | undefined
}

export interface OpenServer {
  engine: RolloutEngine
  /** The address that it listens on. */
  url: string
  /** Lets running requests continue for `graceMs`, then ends everything. */
  close: (graceMs: number) => Promise<void>
}

/** Time for the work after the grace period: abort, last replies, closing. */
export const CLOSE_MS = 5000

const NO_TERMINAL = { write: () => {} }

/** Loads the model and serves it. */
export async function openServer (parts: ServerParts): Promise<OpenServer> {
  const { config, model: { path, root }, log } = parts
  collectOldGarbageLess()
  replyParsers(config.toolCallParser, config.reasoningParser)
  const dialects = [...chooseDialects(config.dialects)]
  const weightLoaders = await loadWeightLoaders(config.weightLoader)
  const tokenizer = await openTokenizer(config, path, log)
  const adapters = parseAdapters(config.loraPaths)
  const telemetry = await openTelemetry(config.otlpEndpoint, log)
  const engine = await load(path, tokenizer, parts)
  await startAdapters(engine, adapters, log).catch(async (error: unknown) => {
    await engine.close()
    throw error
  })
  const app = await buildServer({
    engine,
    tokenizer,
    toolCallParser: config.toolCallParser ?? undefined,
    reasoningParser: config.reasoningParser ?? undefined,
    enableInReasoning: config.enableInReasoning,
    host: config.host,
    port: config.port,
    logger: log,
    apiKey: config.apiKey ?? undefined,
    adminApiKey: config.adminApiKey ?? undefined,
    modelRoots: config.modelRoot.length > 0 ? [...config.modelRoot] : [root],
    weightLoaders,
    bucketBytes: config.bucketBytes,
    warmUp: !config.skipServerWarmup,
    stagedBroadcasts: config.stagedBroadcasts,
    samplingMasks: config.enableReturnSamplingMask,
    groupTimeoutMs: config.groupTimeout * 1000,
    allowedHosts: config.allowedHost.length > 0 ? config.allowedHost : undefined,
    allowMasters: config.allowMaster,
    dialects,
    metricNames: config.metricNames,
    samplingDefaults: config.samplingDefaults,
    maxBodyBytes: config.maxBodyBytes,
    bodyMemory: config.bodyMemory ?? undefined,
    maxRequestMemory: config.maxRequestMemory,
    samplesMemory: config.samplesMemory,
    keepSamples: config.keepSamples,
    truthWarn: config.truthWarn,
    versionWaitMs: config.versionWait * 1000,
    ncclPath: config.ncclPath ?? undefined,
    uploadFolder: config.uploadFolder ?? undefined,
    uploadTimeoutMs: config.uploadTimeout * 1000,
    shownConfig: redact(config),
    telemetry: telemetry ?? undefined,
    ui: config.ui ? { prompts: config.uiPrompts } : false,
    closeGraceMs: config.shutdownTimeout * 1000 + CLOSE_MS
  })
    .catch(async (error: Error) => {
      await engine.close()
      throw listenError(error, config.host, config.port)
    })
  const stopStats = logStats(engine, (fields, line) => log.info(fields, line))
  return {
    engine,
    url: app.listeningOrigin,
    close: async graceMs => {
      stopStats()
      await shutDown(app, engine, graceMs, log)
      await telemetry?.close()
      log.info('shut down')
    }
  }
}

async function openTokenizer (config: Config, modelPath: string, log: Log): Promise<Tokenizer | null> {
  if (config.skipTokenizerInit) return null
  const folder = config.tokenizerPath ?? modelPath
  const tokenizer = await loadTokenizer(folder)
  if (tokenizer !== null) return tokenizer
  if (config.tokenizerPath !== null) {
    throw new RefitError('CONFIG', `--tokenizer-path: ${folder} has no tokenizer.json`, { param: '--tokenizer-path' })
  }
  log.warn(`${folder} has no tokenizer.json: only token ids are served (--skip-tokenizer-init avoids this warning)`)
  return null
}

async function load (
  path: string,
  tokenizer: Tokenizer | null,
  { config, log, place }: ServerParts
): Promise<RolloutEngine> {
  const began = performance.now()
  // The bars of several engines on one terminal would overwrite each other.
  const terminal = place === undefined ? process.stderr : NO_TERMINAL
  const progress = new LoadProgress(terminal, line => log.info(line))
  let engine: RolloutEngine
  try {
    engine = await createEngine(path, {
      ...engineOptions(config, log),
      ...place === undefined ? {} : { dataParallel: place },
      vocabulary: config.grammarBackend === 'none' ? undefined : tokenizer?.vocabulary,
      onProgress: (done, total) => progress.update(done, total)
    })
  } finally {
    progress.end()
  }
  const { info } = engine
  for (const { ordinal, uuid, name } of info.gpus) log.info(`GPU ${ordinal}: ${name}, ${uuid}`)
  log.info(
    { engine: info },
    `loaded in ${
      ((performance.now() - began) / 1000).toFixed(2)
    } s: ${info.architecture} in ${info.dtype} on ${info.device} (${info.isa}), ` +
      `${info.threads} threads, tp ${info.ranks}, weights ${gigabytes(info.weightBytes)}${
        spareText(engine)
      }, KV cache ${gigabytes(info.kvBytes)} for ${info.kvTokens} tokens, context ${info.contextLength}`
  )
  if (config.dtype === 'auto' && await checkpointDType(path) === 'float16') {
    log.info('the checkpoint is in float16 and is held in bfloat16: on GPUs, --dtype float16 keeps its values')
  }
  return engine
}

function engineOptions (config: Config, log: Log): EngineOptions {
  return {
    servedModelName: config.servedModelName ?? config.model ?? undefined,
    weightVersion: config.weightVersion,
    ...config.loadFrom === null
      ? {}
      : {
        loadFrom: {
          url: config.loadFrom,
          key: config.loadFromKey ?? undefined,
          timeoutMs: config.loadFromTimeout * 1000,
          ncclPath: config.ncclPath ?? undefined,
          log: line => log.info(line)
        }
      },
    device: config.device,
    baseGpuId: config.baseGpuId ?? undefined,
    dtype: config.dtype,
    tp: config.tp,
    threads: config.threads ?? undefined,
    contextLength: config.contextLength ?? undefined,
    maxRunningRequests: config.maxRunningRequests ?? undefined,
    maxQueuedRequests: config.maxQueuedRequests,
    maxTotalTokens: config.maxTotalTokens ?? undefined,
    memFraction: config.memFraction ?? undefined,
    maxPrefillTokens: config.maxPrefillTokens ?? undefined,
    pageSize: config.pageSize,
    randomSeed: config.randomSeed ?? undefined,
    updateDeadlineMs: config.updateDeadline * 1000,
    disableCudaGraph: config.disableCudaGraph,
    deterministic: config.deterministic,
    disableOverlapSchedule: config.disableOverlapSchedule,
    speculative: config.speculative,
    speculativeNumDraftTokens: config.speculativeNumDraftTokens,
    disableAdaptiveSpeculation: config.disableAdaptiveSpeculation,
    enableWeightsCpuBackup: config.enableWeightsCpuBackup,
    shadowWeights: config.shadowWeights,
    shadowRate: config.shadowRate,
    oldWeightsTimeoutMs: config.oldWeightsTimeout * 1000,
    enableReturnRoutedExperts: config.enableReturnRoutedExperts,
    ...adapterOptions(config),
    watchdogMs: config.watchdogTimeout * 1000,
    onFailure: error => endOnFailure(error, log, endProcess)
  }
}

function adapterOptions (config: Config): EngineOptions {
  const modules = config.loraTargetModules
  return {
    enableLora: config.enableLora || config.loraPaths.length > 0,
    maxLoras: config.maxLoras,
    maxLoraRank: config.maxLoraRank,
    maxCpuLoras: config.maxCpuLoras,
    ...modules.length === 0 ? {} : { loraTargetModules: modules }
  }
}

function spareText ({ weightSets }: RolloutEngine): string {
  if (weightSets === undefined) return ''
  return ` and ${gigabytes(weightSets.shadow.bytes)} for a second set (--shadow-weights)`
}

function gigabytes (bytes: number): string {
  return bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(2)} GB`
}
