import { statSync } from 'node:fs'
import closeWithGrace from 'close-with-grace'
import { loadConfig } from '../config/load-config.ts'
import { redact } from '../config/redact.ts'
import { resolveModel } from '../config/resolve-model.ts'
import type { Config } from '../config/schema.ts'
import { chooseDialects } from '../app/dialects.ts'
import { createEngine } from '../app/create-engine.ts'
import type { EngineOptions } from '../app/create-engine.ts'
import { endProcess } from '../engine/end-process.ts'
import type { RolloutEngine } from '../contract/rollout-engine.ts'
import { RefitError } from '../errors.ts'
import { buildServer } from '../app/server.ts'
import { loadTokenizer } from '../text/tokenizer.ts'
import type { Tokenizer } from '../text/tokenizer.ts'
import { checkPort, listenError } from './check-port.ts'
import { endOnFailure } from './end-on-failure.ts'
import { createLog } from './log.ts'
import { LoadProgress } from './load-progress.ts'
import { shutDown } from './shut-down.ts'
import { logStats } from './stats-line.ts'
import { loadWeightLoaders } from './weight-loaders.ts'

/** Time for the work after the grace period: abort, last replies, closing. */
const CLOSE_MS = 5000

/** `refit serve`: resolves once the server listens. */
export async function serve (args: readonly string[]): Promise<void> {
  const { config, warnings } = loadConfig(args, process.env)
  const { path, root } = resolveModel(requireModel(config), config.revision, process.env)
  const log = createLog(config.logLevel)
  for (const warning of warnings) log.warn(warning)
  warnOfRoots(config.modelRoot, log)
  log.info({ config: redact(config), node: process.version, pid: process.pid }, `serving ${path}`)
  await checkPort(config.host, config.port)

  const dialects = [...chooseDialects(config.dialects)]
  const weightLoaders = await loadWeightLoaders(config.weightLoader)
  const tokenizer = await openTokenizer(config, path, log)
  const engine = await load(path, config, log)
  const app = await buildServer({
    engine,
    tokenizer,
    host: config.host,
    port: config.port,
    logger: log,
    apiKey: config.apiKey ?? undefined,
    adminApiKey: config.adminApiKey ?? undefined,
    modelRoots: config.modelRoot.length > 0 ? [...config.modelRoot] : [root],
    weightLoaders,
    bucketBytes: config.bucketBytes,
    stagedBroadcasts: config.stagedBroadcasts,
    groupTimeoutMs: config.groupTimeout * 1000,
    allowMasters: config.allowMaster,
    dialects,
    ncclPath: config.ncclPath ?? undefined,
    uploadFolder: config.uploadFolder ?? undefined,
    uploadTimeoutMs: config.uploadTimeout * 1000,
    closeGraceMs: config.shutdownTimeout * 1000 + CLOSE_MS
  })
    .catch(async (error: Error) => {
      await engine.close()
      throw listenError(error, config.host, config.port)
    })
  const stopStats = logStats(engine, (fields, line) => log.info(fields, line))
  closeWithGrace({
    delay: config.shutdownTimeout * 1000 + CLOSE_MS,
    logger: log,
    onSecondSignal: signal => log.warn(`second ${signal}: ending at once`)
  }, async ({ err, signal }) => {
    if (err !== undefined) log.fatal({ err }, 'failed; shutting down')
    else log.info(`${signal ?? 'end'}: shutting down`)
    stopStats()
    await shutDown(app, engine, config.shutdownTimeout * 1000, log)
    log.info('shut down')
  })
  log.info(`${engine.info.servedModelName} is ready on ${app.listeningOrigin}`)
}

type Log = ReturnType<typeof createLog>

function requireModel ({ model }: Config): string {
  if (model !== null) return model
  throw new RefitError(
    'CONFIG',
    'serve needs a MODEL: a folder with config.json and safetensors files, or a name in the local Hugging Face ' +
      'cache; see "refit serve --help"',
    { param: 'MODEL' }
  )
}

/** A warning, not an error: folders may be mounted later, and are read only on request. */
function warnOfRoots (roots: readonly string[], log: Log): void {
  for (const root of roots) {
    let what = 'is no folder'
    try {
      if (statSync(root).isDirectory()) continue
    } catch (error) {
      const { code } = error as NodeJS.ErrnoException
      what = code === 'ENOENT' ? 'does not exist' : `cannot be looked at (${code})`
    }
    log.warn(`--model-root: ${root} ${what}; nothing can be loaded from there as it is`)
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

async function load (path: string, config: Config, log: Log): Promise<RolloutEngine> {
  const began = performance.now()
  const progress = new LoadProgress(process.stderr, line => log.info(line))
  let engine: RolloutEngine
  try {
    engine = await createEngine(path, {
      ...engineOptions(config, log),
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
      `${info.threads} threads, tp ${info.ranks}, weights ${gigabytes(info.weightBytes)}, KV cache ${
        gigabytes(info.kvBytes)
      } for ${info.kvTokens} tokens, context ${info.contextLength}`
  )
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
    enableWeightsCpuBackup: config.enableWeightsCpuBackup,
    enableReturnRoutedExperts: config.enableReturnRoutedExperts,
    watchdogMs: config.watchdogTimeout * 1000,
    onFailure: error => endOnFailure(error, log, endProcess)
  }
}

function gigabytes (bytes: number): string {
  return bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(2)} GB`
}
