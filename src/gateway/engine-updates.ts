import type { IncomingHttpHeaders } from 'node:http'
import type { Fleet } from './fleet.ts'
import { readRefitEngines } from './refit-engines.ts'
import { failureOf } from './replies.ts'

export interface EngineUpdate {
  started_at: number
  engine: string
  [field: string]: unknown
}

export interface JoinedUpdates {
  updates: EngineUpdate[]
  /** Engines that did not answer. */
  errors: { engine: string, message: string }[]
}

/** The updates of all refit engines, the newest first, each with the address of its engine. */
export async function joinUpdates (fleet: Fleet, headers: IncomingHttpHeaders): Promise<JoinedUpdates> {
  const updates: EngineUpdate[] = []
  const errors: JoinedUpdates['errors'] = []
  for (const outcome of await readRefitEngines(fleet, '/updates', headers)) {
    const engine = outcome.worker.url
    const failure = failureOf(outcome)
    const list = 'json' in outcome ? (outcome.json as { updates?: unknown } | null)?.updates : undefined
    if (failure !== null || !Array.isArray(list)) {
      errors.push({ engine, message: failure ?? 'it answered without a list of updates' })
      continue
    }
    for (const update of list as EngineUpdate[]) updates.push({ ...update, engine })
  }
  return { updates: updates.sort((a, b) => b.started_at - a.started_at), errors }
}

/** The trace of an update of the engine that knows its id; undefined if none does. */
export async function findTrace (
  fleet: Fleet,
  id: string,
  headers: IncomingHttpHeaders
): Promise<{ body: Buffer, disposition: string } | undefined> {
  for (const outcome of await readRefitEngines(fleet, `/updates/${encodeURIComponent(id)}/trace.json`, headers)) {
    if ('error' in outcome || outcome.status !== 200) continue
    return { body: outcome.body, disposition: String(outcome.headers['content-disposition'] ?? 'attachment') }
  }
  return undefined
}
