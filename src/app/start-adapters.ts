import { basename, dirname } from 'node:path'
import type { AdapterReport } from '../contract/adapters.ts'
import type { RolloutEngine } from '../contract/rollout-engine.ts'
import { openAdapterFolder } from '../sources/disk/adapter-folder.ts'
import { loadAdapterFromDisk } from '../updates/adapter-load.ts'
import { UpdateLog } from '../updates/update-log.ts'
import { CallJoiner } from '../weights/call-joiner.ts'

/** An adapter that is loaded at the start. */
export interface StartAdapter {
  name: string
  path: string
  pinned: boolean
}

/** Loads adapters before the server listens. Their folders may lie anywhere: whoever starts the server names them. */
export async function startAdapters (
  engine: RolloutEngine,
  adapters: readonly StartAdapter[],
  log: { info: (line: string) => void }
): Promise<void> {
  const host = {
    engine,
    adapterRetries: new CallJoiner<AdapterReport>(),
    updates: new UpdateLog(engine),
    metrics: { observeAdapter: () => {}, observeFailedAdapter: () => {} },
    openAdapter: async (path: string) => await openAdapterFolder(path, { roots: rootsOf(path) })
  }
  for (const adapter of adapters) {
    const { name, version, rank, digest, ms } = await loadAdapterFromDisk(host, adapter)
    log.info(`LoRA adapter ${name} (version ${version}, rank ${rank}, digest ${digest}) in ${ms.total.toFixed(0)} ms`)
  }
}

/** The folder itself. In a Hugging Face cache, its files are links from snapshots/<revision> to blobs beside it. */
function rootsOf (path: string): string[] {
  const snapshots = dirname(path)
  return basename(snapshots) === 'snapshots' ? [path, dirname(snapshots)] : [path]
}
