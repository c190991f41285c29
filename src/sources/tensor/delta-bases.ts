import type { DeltaHost } from '../../contract/delta-host.ts'
import { RefitError } from '../../errors.ts'
import type { WriteReport } from '../../contract/weight-source.ts'

/** A delta that was sent. */
interface Sent {
  /** Null: it cannot be repeated any more. */
  id: string | null
  /** It holds all values of its tensors. */
  isWhole: boolean
  isRunning: boolean
  /** Its update failed, or it was refused because an earlier one is lost. */
  isFailed: boolean
  /** All of it has been written, in use or not. */
  isWritten: boolean
  /** The transaction that it was written in. */
  transaction: string | null
}

/** A delta of one tensor. `epoch`: of the weights when it came, or when a later delta of the tensor came into use. */
interface Entry {
  sent: Sent
  epoch: number
  /** It did not come into use. */
  isLost: boolean
}

/** Calls of an update with a delta. */
export interface DeltaHooks {
  accept: (report: WriteReport) => void
  explain: (error: unknown) => unknown
  /** The update has ended. */
  closed: () => void
}

/** Longest list of deltas of one tensor that have to be repeated. */
const MOST = 64

/**
 * The bases of a trainer's deltas, which do not name them: a delta is relative to the weights that the deltas before it
 * have made. If one of those did not come into use (its update failed, or its transaction was aborted), the next one of
 * its tensors is refused, until the lost one is sent again, or the tensors whole. A delta that was refused because it
 * is wrong in itself does not count.
 */
export class DeltaBases {
  readonly #host: DeltaHost['base']
  /** By tensor, in the order in which they came. Those that are in use are left out. */
  readonly #entries = new Map<string, Entry[]>()

  constructor (host: DeltaHost['base']) {
    this.#host = host
  }

  /** Throws CONFLICT for a tensor that lacks an earlier delta. `isWhole`: it holds all values, so it needs no base. */
  begin (names: readonly string[], id: string, isWhole: boolean): DeltaHooks {
    const lost = new Map(names.map(name => [name, this.#settle(name)]))
    const lacksBase = (name: string): boolean => {
      const first = lost.get(name)![0]
      return first !== undefined && first.sent.id !== id
    }
    const wrong = isWhole ? undefined : names.find(lacksBase)
    const isRefused = wrong !== undefined
    const sent: Sent = {
      id,
      isWhole,
      isRunning: !isRefused,
      isFailed: isRefused,
      isWritten: false,
      transaction: null
    }
    for (const name of names) this.#add(name, sent, lost.get(name)!)
    if (isRefused) throw baseIsLost(wrong, lost.get(wrong)!.length)
    return {
      accept: ({ transaction = null }) => {
        sent.isWritten = true
        sent.transaction = transaction
      },
      explain: error => {
        sent.isFailed = !(error instanceof RefitError && error.statusCode === 400)
        return error
      },
      closed: () => {
        sent.isRunning = false
        // The source is closed before `explain` is called, so a delta that failed must not be forgotten here.
        if (sent.isWritten) { for (const name of names) this.#settle(name) }
      }
    }
  }

  /** Forgets deltas of a tensor that are in use. Returns those that have to be sent again, the first one first. */
  #settle (name: string): Entry[] {
    const written = this.#host.writtenAt(name)
    const open = this.#host.transaction()
    const isUnderWay = ({ sent: { isRunning, transaction } }: Entry): boolean =>
      isRunning || (transaction !== null && transaction === open)
    this.#keep(name, ({ sent: { isRunning, isFailed, isWritten } }) => isRunning || isFailed || isWritten)
    const list = this.#entries.get(name) ?? []
    const used = list.filter(entry =>
      !isUnderWay(entry) && !entry.isLost && entry.sent.isWritten && written > entry.epoch
    )
    if (used.length === 0 || used.some(({ sent }) => sent.isWhole)) {
      // A whole write, by a delta or by another source, replaces all that was lost before it.
      this.#keep(name, entry => isUnderWay(entry) || (!used.includes(entry) && written <= entry.epoch))
    } else {
      this.#keep(name, entry => !used.includes(entry))
      // The delta that came into use is no whole write: those that were lost are lost still.
      for (const entry of list) if (!isUnderWay(entry)) entry.epoch = Math.max(entry.epoch, written)
    }
    const lost = (this.#entries.get(name) ?? []).filter(entry => !isUnderWay(entry))
    for (const entry of lost) entry.isLost = true
    return lost
  }

  #add (name: string, sent: Sent, lost: readonly Entry[]): void {
    const list = this.#entries.get(name) ?? []
    const same = lost.find(({ sent: { id } }) => id === sent.id)
    const entry = { sent, epoch: this.#host.epoch(), isLost: !sent.isRunning }
    if (same !== undefined) {
      // Its place stays that of the order in which the deltas were made, also if it fails again.
      if (sent.isRunning) list[list.indexOf(same)] = entry
    } else if (list.length < MOST) list.push(entry)
    else {
      list.splice(0, list.length, {
        ...entry,
        sent: { ...sent, id: null, isRunning: false, isFailed: true },
        isLost: true
      })
    }
    this.#entries.set(name, list)
  }

  #keep (name: string, isKept: (entry: Entry) => boolean): void {
    const list = this.#entries.get(name)?.filter(isKept) ?? []
    if (list.length === 0) this.#entries.delete(name)
    else this.#entries.set(name, list)
  }
}

function baseIsLost (name: string, count: number): RefitError {
  return new RefitError(
    'CONFLICT',
    `tensor ${JSON.stringify(name)}: ${count === 1 ? 'a delta of it' : `${count} deltas of it`} did not come into ` +
      'use, and this one is relative to the weights with it: send that one again first, or the whole tensor. ' +
      'Nothing has changed',
    { param: name }
  )
}
