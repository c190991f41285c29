import { RefitError } from '../errors.ts'
import { messageOf } from '../remote/connection.ts'
import { ENGINE_KINDS, readFacts } from '../remote/engine-kind.ts'
import type { EngineFacts } from '../remote/engine-kind.ts'
import { catchUp } from './catch-up.ts'
import type { CatchUpOptions } from './catch-up.ts'
import { differenceOfBytes } from './compare-checksums.ts'
import type { Fleet } from './fleet.ts'
import type { Worker } from './worker.ts'

/** Longest wait for an engine's facts. A machine that is gone does not refuse a connection, it is silent. */
export const CHECK_MS = 5000

/**
 * Takes an engine into the rotation if it holds the current weights: the same label as the others and, if both engines
 * report them, the same checksums. Otherwise the current weights are loaded into it (not if `catchUpOptions` is null)
 * and it is compared again. During an update or a pause it waits as `stale`, and gets the updates.
 */
export async function admit (fleet: Fleet, worker: Worker, catchUpOptions: CatchUpOptions | null): Promise<void> {
  const facts = await readNewFacts(fleet, worker)
  if (facts === null) return
  if (!fleet.isQuiet) {
    const waitsFor = fleet.paused ? 'the pause' : 'an update'
    return fleet.unready(worker, 'stale', `it waits for the end of ${waitsFor}`)
  }
  const { updates } = fleet
  const isUnchanged = (): boolean => fleet.isQuiet && fleet.updates === updates
  const peer = await choosePeer(fleet, worker)
  if (peer?.facts?.details['weight_transaction'] != null) {
    return fleet.unready(worker, 'stale', 'it waits for the end of a weight transaction')
  }
  let problem = await findDifference(fleet, worker, peer)
  // Weights that another client manages are not overwritten.
  if (problem !== null && catchUpOptions !== null && !(worker.isForeign && worker.inSync) && isUnchanged()) {
    const failure = await catchUp(fleet, worker, peer, catchUpOptions)
    // Engines that report checksums are compared by those instead.
    if (failure === null && !ENGINE_KINDS[facts.kind].hasChecksums && isUnchanged()) worker.update = updates
    worker.facts = await readFacts(worker.connection, facts.kind, AbortSignal.timeout(CHECK_MS)).catch(() => facts)
    problem = failure === null ? await findDifference(fleet, worker, peer) : `${problem}; ${failure}`
  }
  if (problem === null && worker.isPaused && isUnchanged()) problem = await resume(worker)
  if (!fleet.workers.has(worker.id) || worker.state === 'draining') return
  if (!isUnchanged()) {
    return fleet.unready(
      worker,
      'stale',
      `an update or a pause came while it was ${problem === null ? 'compared' : 'loaded or compared'}`
    )
  }
  if (peer === null && fleet.ready.length > 0) {
    return fleet.unready(worker, 'stale', 'another engine became ready first, with which it is compared next')
  }
  if (problem === null) {
    await fillAdapters(fleet, worker)
    if (isUnchanged()) fleet.admitted(worker)
    else fleet.unready(worker, 'stale', 'an update or a pause came while it loaded adapters')
  } else fleet.unready(worker, 'stale', problem)
}

/** An engine without an adapter still serves requests of the others. */
async function fillAdapters ({ adapters, log }: Fleet, worker: Worker): Promise<void> {
  const lacking = await adapters.fill(worker)
  if (lacking.length === 0) return
  log.warn({ worker: worker.id, url: worker.url, adapters: lacking }, `it lacks LoRA adapters: ${lacking.join('; ')}`)
}

/** Forgets the pause, process groups and announcements of an engine that was restarted: it has lost them. */
export function restarted (fleet: Fleet, worker: Worker): void {
  fleet.announcements.forget(worker)
  fleet.adapters.lost(worker)
  worker.inSync = false
  worker.isPaused = false
  worker.update = 0
  worker.groups.clear()
}

/** Null if the engine does not reply; it is `down` then. */
async function readNewFacts (fleet: Fleet, worker: Worker): Promise<EngineFacts | null> {
  const before = worker.facts
  const signal = AbortSignal.timeout(CHECK_MS)
  try {
    const facts = await readFacts(worker.connection, before?.kind ?? null, signal)
    worker.failures = 0
    const isNewProcess = before !== null &&
      (before.instance !== facts.instance || (worker.hasEnded && !ENGINE_KINDS[facts.kind].showsRestart))
    if (isNewProcess) restarted(fleet, worker)
    worker.hasEnded = false
    worker.facts = facts
    return facts
  } catch (error) {
    fleet.unready(worker, 'down', (error as Error).message)
    // An update that was sent before would wait for its reply forever.
    if (!(error instanceof RefitError) && worker.checkFailed(error as Error, signal.aborted)) {
      await worker.disconnect(new RefitError('ENGINE_FAILED', `${worker.url} is down`))
    }
    return null
  }
}

/**
 * Resumes an engine that missed the end of a pause; requests would wait there otherwise. Returns the failure, or null.
 */
async function resume (worker: Worker): Promise<string | null> {
  try {
    const reply = await worker.connection.json('POST', ENGINE_KINDS[worker.facts!.kind].resume, {}, {
      admin: true,
      signal: AbortSignal.timeout(CHECK_MS)
    })
    if (reply.status >= 400) return `it is paused: ${messageOf(reply)}`
    worker.isPaused = false
    return null
  } catch (error) {
    return `it is paused: ${(error as Error).message}`
  }
}

/** An engine that holds the current weights, with its label read just now; one of the same kind if there is one. */
async function choosePeer (fleet: Fleet, worker: Worker): Promise<Worker | null> {
  const others = fleet.ready.filter(other => other !== worker)
  const peer = others.find(({ facts }) => facts?.kind === worker.facts?.kind) ?? others[0]
  if (peer === undefined) return null
  peer.facts = await readFacts(peer.connection, peer.facts!.kind, AbortSignal.timeout(CHECK_MS)).catch(() => peer.facts)
  if (peer.facts!.torn === null) return peer
  fleet.unready(peer, 'stale', peer.facts!.torn)
  return await choosePeer(fleet, worker)
}

/** The reason why no request may go to the engine; null if there is none. */
async function findDifference (fleet: Fleet, worker: Worker, peer: Worker | null): Promise<string | null> {
  const facts = worker.facts!
  if (facts.torn !== null) return facts.torn
  if (peer === null) return checkWithoutPeer(fleet, worker)
  const theirs = peer.facts!
  if (facts.version !== theirs.version && facts.version !== null && theirs.version !== null) {
    return `it holds version ${JSON.stringify(facts.version)}, the others ${JSON.stringify(theirs.version)}`
  }
  if (worker.inSync && !worker.isForeign) return null
  if (facts.kind === theirs.kind && ENGINE_KINDS[facts.kind].hasChecksums) return await differenceOfBytes(worker, peer)
  return fleet.updates === 0 || (worker.update === fleet.updates && fleet.isOnDisk)
    ? null
    : 'it missed updates, and engines of this kind report no checksums: a whole update from disk lets it in'
}

/** With no engine to compare with, only the count of updates shows whether the weights are current. */
function checkWithoutPeer (fleet: Fleet, worker: Worker): string | null {
  if (fleet.updates === 0 || worker.inSync || worker.update === fleet.updates) return null
  return 'it missed updates, and no engine is left that holds them: send a whole update'
}
