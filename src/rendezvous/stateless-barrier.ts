import { randomUUID } from 'node:crypto'
import type { Store } from './store.ts'
import { Deadline } from './deadline.ts'
import type { Limits } from './deadline.ts'

const ARRIVED = '1'
/** `pickle.dumps(None)`. */
const NONE = Buffer.of(0x80, 4, 0x4e, 0x2e)

/**
 * `StatelessProcessGroup.barrier` of vLLM (distributed/utils.py), for a group in which ranks 0 to `ranks` - 1 are ours
 * and the last one is a client's. In older versions every rank broadcasts an object and reads all others'. In newer
 * versions rank 0 broadcasts an id, and every rank sets keys with that id for its arrival and its departure. Nothing
 * announces the version, so this side writes the keys of both, and the client's keys show which it is.
 */
export class StatelessBarrier {
  readonly #store: Store
  readonly #ranks: number
  #round = 0
  #isNew: boolean | undefined

  constructor (store: Store, ranks: number) {
    this.#store = store
    this.#ranks = ranks
  }

  /** Resolves when the client has arrived. Throws DEADLINE and the errors of the store. */
  async pass (limits: Limits & { timeoutMs: number }): Promise<void> {
    const deadline = new Deadline(limits, limits.timeoutMs)
    const round = this.#round++
    const id = `barrier_${randomUUID()}`
    const own = Array.from({ length: this.#ranks }, (_, rank) => rank)
    const arrivals = own.map(rank => `arrival_${id}_${rank}`)
    // Rank 0 has broadcast once before: the id of the communicator.
    const objects = own.map(rank => `broadcast_from/${rank}/${rank === 0 ? round + 1 : round}`)
    const answer = `broadcast_from/${this.#ranks}/${round}`
    const departure = `departure_${id}_${this.#ranks}`
    for (const key of arrivals) await this.#store.set(key, ARRIVED, deadline)
    for (const key of objects.slice(1)) await this.#store.set(key, NONE, deadline)
    // Older versions read an object here and ignore its value.
    await this.#store.set(objects[0]!, pickledText(id), deadline)
    this.#isNew ??= await this.#whichComes(departure, answer, deadline)
    await this.#store.wait([this.#isNew ? departure : answer], deadline)
    const all = [...arrivals, ...objects, ...this.#isNew ? [`arrival_${id}_${this.#ranks}`, departure] : [answer]]
    for (const key of all) await this.#store.deleteKey(key, deadline)
  }

  async #whichComes (departure: string, answer: string, deadline: Deadline): Promise<boolean> {
    const race = new AbortController()
    const leave = (): void => {
      race.abort(deadline.signal?.reason)
    }
    deadline.signal?.addEventListener('abort', leave)
    const limits = { timeoutMs: deadline.timeoutMs, signal: race.signal }
    const runners = [
      this.#store.wait([departure], limits).then(() => true),
      this.#store.wait([answer], limits).then(() => false)
    ]
    try {
      return await Promise.race(runners)
    } finally {
      deadline.signal?.removeEventListener('abort', leave)
      race.abort(new Error('the other was first'))
      await Promise.allSettled(runners)
    }
  }
}

/** Pickle protocol 4 of a short ASCII text. */
function pickledText (text: string): Buffer {
  return Buffer.concat([Buffer.of(0x80, 4, 0x8c, text.length), Buffer.from(text), Buffer.of(0x2e)])
}
