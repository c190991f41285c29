import { HttpTarget } from './http-target.ts'
import { Broken } from './promise.ts'
import type { Row } from './promise.ts'
import { PROMISES } from './promises/index.ts'
import { runPromises } from './run-promises.ts'
import type { RunOptions } from './run-promises.ts'
import { findServer } from './servers/detect.ts'
import type { ServerKind } from './servers/detect.ts'
import type { Context } from './context.ts'
import { setUp } from './setup.ts'
import type { SetupOptions } from './setup.ts'

export interface CheckOptions extends Omit<SetupOptions, 'server'>, RunOptions {
  apiKey?: string | undefined
  adminKey?: string | undefined
  patienceMs: number
  dialect: ServerKind | null
}

const SETUP = {
  group: 'setup',
  id: 'three-checkpoints',
  way: '',
  title: 'After clean whole updates to A, B and C, the server answers in three ways.'
}

/** Checks all promises. Throws ENGINE_FAILED if the server cannot be reached or takes no update. */
export async function checkServer (url: string, options: CheckOptions): Promise<Row[]> {
  const target = new HttpTarget(url, options)
  try {
    const server = await findServer(target, options.dialect)
    const before = { label: await server.label(), path: await server.modelPath() }
    const began = performance.now()
    let context: Context
    try {
      context = await setUp({ ...options, server })
    } catch (error) {
      if (!(error instanceof Broken)) throw error
      const seconds = Math.round(performance.now() - began) / 1000
      const row: Row = { ...SETUP, verdict: 'broken', detail: error.message, seconds }
      options.onRow?.(row)
      return [row]
    }
    try {
      return await runPromises(context, PROMISES, options)
    } finally {
      await putBack(context, before)
      await context.close()
    }
  } finally {
    await target.close()
  }
}

/** The server gets back its weights, the path that it reported, and its label. */
async function putBack (context: Context, before: { label: string | null, path: string | null }): Promise<void> {
  const { server } = context
  try {
    await context.restore()
    // SGLang reports the last folder that it loaded, and the work folder is removed.
    if (before.path !== null && await server.modelPath() !== before.path) {
      await server.loadFolder(before.path, before.label ?? undefined)
    }
    if (before.label !== null) await server.setLabel(before.label)
  } catch (error) {
    // The last row reports a server that takes no weights.
    if (!(error instanceof Broken)) throw error
  }
}
