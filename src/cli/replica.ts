import type { ResolvedModel } from '../config/resolve-model.ts'
import type { Config } from '../config/schema.ts'
import type { DataParallel } from '../contract/rollout-engine.ts'
import { endProcess } from '../engine/end-process.ts'
import { RefitError } from '../errors.ts'
import type { ErrorCode } from '../errors.ts'
import { createLog } from './log.ts'
import { CLOSE_MS, openServer } from './open-server.ts'
import type { OpenServer } from './open-server.ts'

// The process of one engine of `refit serve --dp`. ReplicaProcess starts it, and it ends with that parent.

export type ToReplica = { type: 'start', config: Config, model: ResolvedModel, place: DataParallel } | { type: 'stop' }

export type FromReplica =
  | { type: 'ready', url: string, name: string }
  | { type: 'failed', code: ErrorCode, message: string, param: string | undefined }

let server: OpenServer | undefined
let graceMs = 0

// Ctrl-C reaches the parent as well, which tells its engines how to end.
for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP'] as const) process.on(signal, () => {})
process.on('message', (message: ToReplica) => {
  void (message.type === 'start' ? start(message) : stop(graceMs, 0))
})
process.once('disconnect', () => {
  void stop(0, 1)
})

async function start ({ config, model, place }: ToReplica & { type: 'start' }): Promise<void> {
  graceMs = config.shutdownTimeout * 1000
  const log = createLog(config.logLevel).child({ dp_rank: place.rank }, { msgPrefix: `engine ${place.rank}: ` })
  try {
    server = await openServer({ config, model, log, place })
    report({ type: 'ready', url: server.url, name: server.engine.info.servedModelName })
  } catch (error) {
    const { message, stack = message } = error as Error
    const isKnown = error instanceof RefitError && error.code !== 'INTERNAL'
    report({
      type: 'failed',
      code: error instanceof RefitError ? error.code : 'INTERNAL',
      message: isKnown ? message : stack,
      param: error instanceof RefitError ? error.param : undefined
    })
  }
}

/** While the model is being loaded there is nothing to end in order. */
async function stop (graceMs: number, exitCode: number): Promise<void> {
  setTimeout(() => endProcess(1), graceMs + CLOSE_MS).unref()
  await server?.close(graceMs)
  endProcess(server === undefined ? 1 : exitCode)
}

function report (message: FromReplica): void {
  if (process.connected) process.send!(message)
}
