import { endOfExchange } from '../../wire/trainers/checkpoint-engine.ts'
import { Replier } from './zmq-rep.ts'

/** A socket of the parameter server, and the engine's ranks that use it. */
export interface Slot {
  /** UUID of the GPU that it is for, or null on an engine without GPUs. */
  gpu: string | null
  /** The endpoint as the request names it. */
  endpoint: string
  /** Path of its Unix socket; `\0name` for an abstract one. */
  path: string
  ranks: number[]
}

export interface PeersOptions {
  /** Longest time until each of them has bound its socket. */
  connectMs: number
  /** Longest silence of each of them. */
  silenceMs: number
  signal: AbortSignal
}

/**
 * The parameter server's ranks that this engine replies to: all send the same at every step, and continue after all
 * have their reply.
 */
export class Peers {
  readonly slots: readonly Slot[]
  readonly #repliers: readonly Replier[]
  readonly #options: PeersOptions
  /** The last request of each rank, and how often each has sent None: the second time is the end. */
  readonly #last: Buffer[] = []
  readonly #nones: number[] = []

  private constructor (slots: readonly Slot[], repliers: readonly Replier[], options: PeersOptions) {
    this.slots = slots
    this.#repliers = repliers
    this.#options = options
  }

  /** Throws ZMQ_UNREACHABLE, ZMQ_PROTOCOL or DEADLINE; no connection stays open then. */
  static async connect (slots: readonly Slot[], options: PeersOptions): Promise<Peers> {
    const { connectMs, signal } = options
    const found = await Promise.allSettled(
      slots.map(async ({ path, endpoint }) =>
        await Replier.connect({ path, name: `the parameter server at ${endpoint}`, connectMs, signal })
      )
    )
    const repliers = found.flatMap(one => one.status === 'fulfilled' ? [one.value] : [])
    const failed = found.find(one => one.status === 'rejected')
    const peers = new Peers(slots, repliers, options)
    if (failed === undefined) return peers
    peers.close()
    throw failed.reason
  }

  /** The next request of each rank. */
  async receive (): Promise<Buffer[]> {
    const failed = new AbortController()
    const either = AbortSignal.any([this.#options.signal, failed.signal])
    try {
      return await Promise.all(this.#repliers.map(async (_, index) => await this.#next(index, either)))
    } catch (error) {
      // Requests of the other ranks stay in their queues until `dismiss` reads them.
      failed.abort(error)
      throw error
    }
  }

  /** Replies to all ranks; an empty text is success. */
  reply (error = ''): void {
    for (const replier of this.#repliers) if (replier.hasRequest) replier.reply(error)
  }

  /**
   * Sends the error to all ranks and waits until each has sent its last message: a rank whose connection closes earlier
   * would wait for it forever. A rank that has sent its last message waits for the end of the HTTP request instead.
   * Never throws.
   */
  async dismiss (error: string): Promise<void> {
    await Promise.allSettled(this.#repliers.map(async (replier, index) => {
      for (let hasError = false;; hasError = true) {
        // verl waits for a reply to its last bucket, and checkpoint-engine for one to its second None.
        if (replier.hasRequest) replier.reply(error)
        if (this.#hasEnded(index, hasError)) return
        await this.#next(index, this.#options.signal)
      }
    }))
  }

  close (): void {
    for (const replier of this.#repliers) replier.close()
  }

  async #next (index: number, signal: AbortSignal): Promise<Buffer> {
    const bytes = await this.#repliers[index]!.receive(this.#options.silenceMs, signal)
    this.#last[index] = bytes
    if (isNone(bytes)) this.#nones[index] = (this.#nones[index] ?? 0) + 1
    return bytes
  }

  /** `hasError`: its last request came after the error. Before it, what looks like an exception is a wrong message. */
  #hasEnded (index: number, hasError: boolean): boolean {
    const last = this.#last[index]
    if (last === undefined) return false
    const type = endOf(last)
    return this.#nones[index] === 2 || type === 'bucket' || (type === 'stop' && hasError)
  }
}

/** A pickled None: two bytes for the protocol, N and a full stop. */
function isNone (bytes: Buffer): boolean {
  return bytes.length === 4 && bytes[0] === 0x80 && bytes.toString('latin1', 2) === 'N.'
}

function endOf (bytes: Buffer): 'stop' | 'bucket' | null {
  try {
    return endOfExchange(bytes)
  } catch {
    // It is not readable at all.
    return null
  }
}
