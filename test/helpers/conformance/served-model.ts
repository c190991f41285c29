import { mkdirSync, mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import type { Test } from 'tap'
import { createEngine } from '../../../src/app/create-engine.ts'
import { createServer } from '../../../src/app/server.ts'
import type { ServerOptions } from '../../../src/app/server.ts'
import type { CheckOptions } from '../../../src/conformance/check-server.ts'
import { TRANSPORTS } from '../../../src/conformance/setup.ts'
import { packageRoot } from '../../../src/root.ts'

/** The model that conformance tests serve. */
export const MODEL = join(packageRoot, 'models/adder-base')

export interface ServedModel {
  url: string
  /** Options for a check of this server. */
  options: CheckOptions
}

/** A refit server of the bundled model, and a folder that it may load from. */
export async function serveModel (
  t: Test,
  { tp = 1, deterministic = false, ...options }: Partial<ServerOptions> & { tp?: number, deterministic?: boolean } = {}
): Promise<ServedModel> {
  const folder = mkdtempSync(join(tmpdir(), 'refit-conformance-test-'))
  const work = join(folder, 'work')
  mkdirSync(work)
  const engine = await createEngine(MODEL, { threads: 1, tp, deterministic, maxTotalTokens: 32_768 })
  const app = await createServer({ engine, modelRoots: [folder], closeGraceMs: 500, uploadFolder: folder, ...options })
  const url = await app.listen({ host: '127.0.0.1', port: 0 })
  t.teardown(async () => {
    await app.close()
    await engine.close()
    rmSync(folder, { recursive: true })
  })
  return {
    url,
    options: {
      work: { path: work, serverPath: work, model: MODEL },
      address: '127.0.0.1',
      patienceMs: 120_000,
      dialect: null,
      transports: TRANSPORTS
    }
  }
}
