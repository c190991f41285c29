import { readServerMessage } from '../../wire/trainers/checkpoint-engine.ts'
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
    const { silenceMs, signal } = this.#options
    const failed = new AbortController()
    const either = AbortSignal.any([signal, failed.signal])
    try {
      return await Promise.all(this.#repliers.map(async replier => await replier.receive(silenceMs, either)))
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
   * Sends the error to all ranks and waits until each has confirmed that it stops: a rank whose connection closes
   * earlier would wait for it forever. Never throws.
   */
  async dismiss (error: string): Promise<void> {
    const { silenceMs, signal } = this.#options
    await Promise.allSettled(this.#repliers.map(async replier => {
      for (let stopped = false; !stopped;) {
        if (replier.hasRequest) replier.reply(error)
        stopped = isStop(await replier.receive(silenceMs, signal))
        // verl waits for a reply to its last bucket, too.
        if (stopped && replier.hasRequest) replier.reply(error)
      }
    }))
  }

  close (): void {
    for (const replier of this.#repliers) replier.close()
  }
}

function isStop (bytes: Buffer): boolean {
  try {
    const message = readServerMessage(bytes)
    return message.type === 'stop' || (message.type === 'bucket' && message.isLast === true)
  } catch {
    // It is a handle, or not readable at all.
    return false
  }
}
