import { CHECK_MS } from './admission.ts'
import { failureOf } from './replies.ts'
import type { Outcome } from './replies.ts'
import type { Worker } from './worker.ts'

/** The open transaction of an engine, as /weight_transactions reports it. */
interface OpenTransaction {
  id: string
  kind: 'transaction' | 'scope'
  written_count: number
}

/**
 * After some engines refused to begin a transaction, aborts it on the others: updates without its id would otherwise
 * belong to it there and to none here. A transaction that has written something stays open.
 */
export async function abortBegun (outcomes: readonly Outcome[], authorization: string | undefined): Promise<void> {
  const begun = outcomes.filter(outcome => failureOf(outcome) === null).map(({ worker }) => worker)
  const reason = 'another engine behind the gateway refused to begin'
  await abortOpen(begun, authorization, reason, open => open.written_count === 0)
}

/**
 * After the end of a transaction, aborts it on engines that had missed a part of it and refused to end it: the client
 * gets no error for an engine that is out of the rotation. Left open, it would refuse the load that cures the engine
 * until its deadline. `id`: null for a trainer's scope.
 */
export async function abortMissed (
  outcomes: readonly Outcome[],
  ready: readonly Worker[],
  id: string | null,
  authorization: string | undefined
): Promise<void> {
  if (!outcomes.some(outcome => ready.includes(outcome.worker) && failureOf(outcome) === null)) return
  const missed = outcomes.filter(outcome =>
    !ready.includes(outcome.worker) && outcome.worker.state !== 'down' && failureOf(outcome) !== null
  )
  const reason = 'it missed a part that other engines behind the gateway got, and they have ended it'
  await abortOpen(
    missed.map(({ worker }) => worker),
    authorization,
    reason,
    open => id === null ? open.kind === 'scope' : open.id === id
  )
}

/** Engines that do not answer keep theirs: a check finds out about them. */
async function abortOpen (
  workers: readonly Worker[],
  authorization: string | undefined,
  reason: string,
  isMeant: (open: OpenTransaction) => boolean
): Promise<void> {
  const refits = workers.filter(({ facts }) => facts?.kind === 'refit')
  await Promise.all(refits.map(async ({ connection }) => {
    const options = {
      admin: true,
      headers: authorization === undefined ? {} : { authorization },
      signal: AbortSignal.timeout(CHECK_MS)
    }
    try {
      const { body } = await connection.json('GET', '/weight_transactions', undefined, options)
      const { open } = (body ?? {}) as { open?: OpenTransaction | null }
      if (open == null || !isMeant(open)) return
      await connection.json('POST', `/weight_transactions/${encodeURIComponent(open.id)}/abort`, { reason }, options)
    } catch {}
  }))
}
