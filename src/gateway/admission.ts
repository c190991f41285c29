import { createHash } from 'node:crypto'
import { RefitError } from '../errors.ts'
import { messageOf } from '../remote/connection.ts'
import { ENGINE_KINDS, readFacts } from '../remote/engine-kind.ts'
import type { EngineFacts } from '../remote/engine-kind.ts'
import type { Fleet } from './fleet.ts'
import { catchUp } from './catch-up.ts'
import type { CatchUpOptions } from './catch-up.ts'
import type { Worker } from './worker.ts'

/** How long an engine may take to say what it is; a machine that is gone does not refuse, it is silent. */
export const LOOK_MS = 5000
/** And its checksums, of weights that may have to be read from memory at the pace of a busy host. */
const COMPARE_MS = 300_000

/**
 * Lets an engine into the rotation if it holds what those in it hold: the same label and, where both can tell, the same checksums. One that
 * does not is filled (with null it is not) and compared again. While an update or a pause goes on it waits, as `stale`: updates reach it.
 */
export async function admit (fleet: Fleet, worker: Worker, filling: CatchUpOptions | null): Promise<void> {
  const before = worker.facts
  let facts: EngineFacts
  const signal = AbortSignal.timeout(LOOK_MS)
  try {
    facts = await readFacts(worker.connection, before?.kind ?? null, signal)
  } catch (error) {
    fleet.unready(worker, 'down', (error as Error).message)
    // An update that waits there since before would wait for ever.
    if (!(error instanceof RefitError) && worker.lookFailed(error as Error, signal.aborted)) {
      await worker.cut(new RefitError('ENGINE_FAILED', `${worker.url} is down`))
    }
    return
  }
  worker.failures = 0
  if (
    before !== null &&
    (before.instance !== facts.instance || (worker.hasEnded && !ENGINE_KINDS[facts.kind].showsRestart))
  ) startedAnew(fleet, worker)
  worker.hasEnded = false
  worker.facts = facts
  if (!fleet.isQuiet) {
    return fleet.unready(
      worker,
      'stale',
      fleet.paused
        ? 'it waits for the end of the pause'
        : 'it waits for the end of an update'
    )
  }
  const { updates } = fleet
  const peer = await reference(fleet, worker)
  if (peer?.facts?.details['weight_transaction'] != null) {
    return fleet.unready(worker, 'stale', 'it waits for the end of a weight transaction')
  }
  let problem = await difference(fleet, worker, peer)
  // What somebody else is updating is not overwritten.
  if (problem !== null && filling !== null && !(worker.isForeign && worker.inSync) && isUnchanged()) {
    const failure = await catchUp(fleet, worker, peer, filling)
    // The others are compared by their bytes.
    if (failure === null && !ENGINE_KINDS[facts.kind].hasChecksums && isUnchanged()) worker.update = updates
    worker.facts = await readFacts(worker.connection, facts.kind, AbortSignal.timeout(LOOK_MS)).catch(() => facts)
    problem = failure === null ? await difference(fleet, worker, peer) : `${problem}; ${failure}`
  }
  if (problem === null && worker.isPaused && isUnchanged()) problem = await goOn(worker)
  if (!fleet.workers.has(worker.id) || worker.state === 'draining') return
  if (!isUnchanged()) {
    return fleet.unready(
      worker,
      'stale',
      `an update or a pause came while it was ${problem === null ? 'compared' : 'filled or compared'}`
    )
  }
  if (peer === null && fleet.ready.length > 0) {
    return fleet.unready(worker, 'stale', 'another engine became ready first, with which it is compared next')
  }
  if (problem === null) fleet.admitted(worker)
  else fleet.unready(worker, 'stale', problem)

  function isUnchanged (): boolean {
    return fleet.isQuiet && fleet.updates === updates
  }
}

export function startedAnew (fleet: Fleet, worker: Worker): void {
  fleet.announced.forget(worker)
  worker.inSync = false
  worker.isPaused = false
  worker.update = 0
  worker.groups.clear()
}

/** It missed the end of a pause: what it were sent would wait there. */
async function goOn (worker: Worker): Promise<string | null> {
  try {
    const reply = await worker.connection.json('POST', ENGINE_KINDS[worker.facts!.kind].resume, {}, {
      admin: true,
      signal: AbortSignal.timeout(LOOK_MS)
    })
    if (reply.status >= 400) return `it is paused: ${messageOf(reply)}`
    worker.isPaused = false
    return null
  } catch (error) {
    return `it is paused: ${(error as Error).message}`
  }
}

/** An engine that holds the current weights, just asked for their label. */
async function reference (fleet: Fleet, worker: Worker): Promise<Worker | null> {
  const others = fleet.ready.filter(other => other !== worker)
  const peer = others.find(({ facts }) => facts?.kind === worker.facts?.kind) ?? others[0]
  if (peer === undefined) return null
  peer.facts = await readFacts(peer.connection, peer.facts!.kind, AbortSignal.timeout(LOOK_MS)).catch(() => peer.facts)
  return peer
}

/** Why it cannot be routed to; null where nothing stands against it. */
async function difference (fleet: Fleet, worker: Worker, peer: Worker | null): Promise<string | null> {
  const facts = worker.facts!
  if (facts.torn !== null) return facts.torn
  if (peer === null) return alone(fleet, worker)
  const theirs = peer.facts!
  if (facts.version !== theirs.version && facts.version !== null && theirs.version !== null) {
    return `it holds version ${JSON.stringify(facts.version)}, the others ${JSON.stringify(theirs.version)}`
  }
  if (worker.inSync && !worker.isForeign) return null
  if (facts.kind === theirs.kind && ENGINE_KINDS[facts.kind].hasChecksums) return await compareBytes(worker, peer)
  return fleet.updates === 0 || (worker.update === fleet.updates && fleet.isOnDisk)
    ? null
    : 'it missed updates, and engines of this kind tell no checksums: a whole update from disk lets it in'
}

/** Nobody holds the current weights who could be asked. */
function alone (fleet: Fleet, worker: Worker): string | null {
  if (fleet.updates === 0 || worker.inSync || worker.update === fleet.updates) return null
  return 'it missed updates, and no engine is left that holds them: send a whole update'
}

async function compareBytes (worker: Worker, peer: Worker): Promise<string | null> {
  const [own, theirs] = await Promise.all([checksums(worker), checksums(peer)])
  if (typeof own === 'string') return `its checksums could not be read: ${own}`
  if (typeof theirs === 'string') return `checksums of ${peer.url} could not be read: ${theirs}`
  if (own.digest === theirs.digest) return null
  const different = [...theirs.tensors].filter(([name, checksum]) => own.tensors.get(name) !== checksum).map(([name]) =>
    name
  )
  const shown = different.slice(0, 3).join(', ')
  return `it holds other weights than ${peer.url}${
    different.length === 0 ? '' : `: ${shown}${different.length > 3 ? ` and ${different.length - 3} more` : ''}`
  }`
}

interface Checksums {
  digest: string
  tensors: ReadonlyMap<string, string>
}

/** Of whole tensors where the engine tells them, which do not depend on its ranks; else of the engine. A text says what failed. */
async function checksums ({ connection }: Worker): Promise<Checksums | string> {
  try {
    const reply = await connection.json('POST', '/weights_checker', { action: 'checksum' }, {
      admin: true,
      signal: AbortSignal.timeout(COMPARE_MS)
    })
    const { checksums: tensors, per_engine_checksum: whole } = (reply.body ?? {}) as {
      checksums?: Record<string, string>
      per_engine_checksum?: string
    }
    if (reply.status >= 400) return messageOf(reply)
    if (typeof tensors === 'object' && tensors !== null) {
      const sorted = Object.entries(tensors).sort(([a], [b]) => a < b ? -1 : 1)
      return { digest: createHash('sha256').update(JSON.stringify(sorted)).digest('hex'), tensors: new Map(sorted) }
    }
    return typeof whole === 'string' ? { digest: whole, tensors: new Map() } : 'the reply names none'
  } catch (error) {
    return (error as Error).message
  }
}
