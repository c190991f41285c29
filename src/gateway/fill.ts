import { messageOf } from '../remote/connection.ts'
import type { Fleet } from './fleet.ts'
import type { Worker } from './worker.ts'

/** Gives an engine the current weights: from the checkpoint that they came from. Null where that worked, else why not. */
export async function fill (fleet: Fleet, worker: Worker, peer: Worker | null): Promise<string | null> {
  const path = fleet.checkpoint ?? peer?.facts?.modelPath ?? null
  if (!fleet.isOnDisk || path === null) return 'the current weights came from no checkpoint that it could be filled from'
  if (worker.facts?.dialect === 'vllm') return 'engines of this kind are not filled'
  const version = peer?.facts?.version ?? fleet.version
  const label = version === null ? {} : { weight_version: version }
  try {
    const reply = await worker.connection.json('POST', '/update_weights_from_disk', { model_path: path, abort_all_requests: true, ...label }, { admin: true })
    const isDone = reply.status < 400 && (reply.body as { success?: unknown } | undefined)?.success !== false
    return isDone ? null : `it could not be filled from ${path}: ${messageOf(reply)}`
  } catch (error) {
    return `it could not be filled from ${path}: ${(error as Error).message}`
  }
}
