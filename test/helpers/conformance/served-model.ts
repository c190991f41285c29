import { cpSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import type { Test } from 'tap'
import { createEngine } from '../../../src/app/create-engine.ts'
import { createServer } from '../../../src/app/server.ts'
import type { ServerOptions } from '../../../src/app/server.ts'
import type { CheckOptions } from '../../../src/conformance/check-server.ts'
import { TRANSPORTS } from '../../../src/conformance/setup.ts'
import { packageRoot } from '../../../src/root.ts'

/** The bundled model. */
export const MODEL = join(packageRoot, 'models/adder-base')

export interface ServedModel {
  url: string
  /** Options for a check of this server. */
  options: CheckOptions
}

type ServedOptions = Partial<ServerOptions> & { tp?: number, deterministic?: boolean, isSmall?: boolean }

/**
 * A refit server of the bundled model, and a folder that it may load from. `isSmall`: of a model with a fifth of the
 * weights and no tokenizer, for tests that send them hundreds of times.
 */
export async function serveModel (
  t: Test,
  { tp = 1, deterministic = false, isSmall = false, ...options }: ServedOptions = {}
): Promise<ServedModel> {
  const folder = mkdtempSync(join(tmpdir(), 'refit-conformance-test-'))
  const work = join(folder, 'work')
  mkdirSync(work)
  const model = isSmall ? makeSmall(join(folder, 'model')) : MODEL
  const engine = await createEngine(model, { threads: 1, tp, deterministic, maxTotalTokens: 32_768 })
  const app = await createServer({
    engine,
    modelRoots: [folder],
    closeGraceMs: 500,
    uploadFolder: folder,
    warmUp: false,
    ...options
  })
  const url = await app.listen({ host: '127.0.0.1', port: 0 })
  t.teardown(async () => {
    await app.close()
    await engine.close()
    rmSync(folder, { recursive: true })
  })
  return {
    url,
    options: {
      work: { path: work, serverPath: work, model },
      address: '127.0.0.1',
      patienceMs: 120_000,
      dialect: null,
      transports: TRANSPORTS
    }
  }
}

/** Its head is tied, too. In its long context, an answer outlasts the calls that are made beside it. */
function makeSmall (folder: string): string {
  cpSync(join(packageRoot, 'test/goldens/qwen2'), folder, { recursive: true })
  const path = join(folder, 'config.json')
  const config = JSON.parse(readFileSync(path, 'utf8'))
  writeFileSync(path, JSON.stringify({ ...config, max_position_embeddings: 2048 }))
  return folder
}
