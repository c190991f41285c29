import { statSync } from 'node:fs'
import closeWithGrace from 'close-with-grace'
import { loadConfig } from '../config/load-config.ts'
import { redact } from '../config/redact.ts'
import { resolveModel } from '../config/resolve-model.ts'
import type { Config } from '../config/schema.ts'
import { RefitError } from '../errors.ts'
import { endProcess } from '../engine/end-process.ts'
import { checkPort } from './check-port.ts'
import { createLog } from './log.ts'
import type { Log } from './log.ts'
import { CLOSE_MS, openServer } from './open-server.ts'
import type { ServerParts } from './open-server.ts'
import { serveReplicas } from './serve-replicas.ts'
import type { Served } from './serve-replicas.ts'

/** `refit serve`: resolves once the server listens. */
export async function serve (args: readonly string[]): Promise<void> {
  const { config, warnings } = loadConfig(args, process.env)
  const model = resolveModel(requireModel(config), config.revision, process.env)
  const log = createLog(config.logLevel)
  for (const warning of warnings) log.warn(warning)
  warnOfRoots(config.modelRoot, log)
  log.info({ config: redact(config), node: process.version, pid: process.pid }, `serving ${model.path}`)
  await checkPort(config.host, config.port)

  const { url, name, close, exit, endsInOrder } = config.dp > 1
    ? await serveReplicas(config, model, log)
    : await serveOne({ config, model, log })
  closeWithGrace({
    delay: config.shutdownTimeout * 1000 + CLOSE_MS,
    logger: log,
    onSecondSignal: signal => {
      log.warn(`second ${signal}: ending at once`)
      exit(1)
    },
    onSecondError: error => {
      log.fatal({ err: error }, 'failed again; ending at once')
      exit(1)
    },
    onTimeout: ms => {
      log.error(`not shut down within ${ms / 1000} s; ending at once`)
      exit(1)
    }
  }, async ({ err, signal }) => {
    if (err !== undefined) log.fatal({ err }, 'failed; shutting down')
    else log.info(`${signal ?? 'end'}: shutting down`)
    try {
      await close()
    } catch (error) {
      log.fatal({ err: error }, 'the shutdown failed; ending at once')
      exit(1)
    }
    if (!endsInOrder) exit(err === undefined ? 0 : 1)
  })
  log.info(`${name} is ready on ${url}`)
}

async function serveOne (parts: ServerParts): Promise<Served> {
  const { engine, url, close } = await openServer(parts)
  const graceMs = parts.config.shutdownTimeout * 1000
  return {
    name: engine.info.servedModelName,
    url,
    close: async () => await close(graceMs),
    exit: endProcess,
    // NCCL may still abort a communicator on a thread that nothing waits for.
    endsInOrder: engine.info.gpus.length === 0
  }
}

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
