import { readServerMessage } from '../../wire/trainers/checkpoint-engine.ts'
import { Replier } from './zmq-rep.ts'

/** A parameter server's socket for some of the engine's ranks. */
export interface Seat {
  /** UUID of the card that it was named by, or null on an engine without cards. */
  card: string | null
  /** As it was named. */
  endpoint: string
  /** Of its Unix socket; `\0name` for an abstract one. */
  path: string
  ranks: number[]
}

export interface PeersOptions {
  /** Longest that one of them may take to bind its socket. */
  connectMs: number
  /** And to send something. */
  silenceMs: number
  signal: AbortSignal
}

/** All ranks of the parameter server that this engine answers: they send the same at every step, and go on when all are answered. */
export class Peers {
  readonly seats: readonly Seat[]
  readonly #repliers: readonly Replier[]
  readonly #options: PeersOptions

  private constructor (seats: readonly Seat[], repliers: readonly Replier[], options: PeersOptions) {
    this.seats = seats
    this.#repliers = repliers
    this.#options = options
  }

  /** Throws ZMQ_UNREACHABLE, ZMQ_PROTOCOL or DEADLINE; none is connected then. */
  static async connect (seats: readonly Seat[], options: PeersOptions): Promise<Peers> {
    const { connectMs, signal } = options
    const found = await Promise.allSettled(
      seats.map(async ({ path, endpoint }) =>
        await Replier.connect({ path, name: `the parameter server at ${endpoint}`, connectMs, signal })
      )
    )
    const repliers = found.flatMap(one => one.status === 'fulfilled' ? [one.value] : [])
    const failed = found.find(one => one.status === 'rejected')
    const peers = new Peers(seats, repliers, options)
    if (failed === undefined) return peers
    peers.close()
    throw failed.reason
  }

  /** The next request of each. */
  async receive (): Promise<Buffer[]> {
    const { silenceMs, signal } = this.#options
    const failed = new AbortController()
    const either = AbortSignal.any([signal, failed.signal])
    try {
      return await Promise.all(this.#repliers.map(async replier => await replier.receive(silenceMs, either)))
    } catch (error) {
      // Nobody takes what the others send now, until they are dismissed.
      failed.abort(error)
      throw error
    }
  }

  /** Nothing means that all is well. */
  reply (error = ''): void {
    for (const replier of this.#repliers) if (replier.owes) replier.reply(error)
  }

  /**
   * Tells all of them what is wrong, and waits until each has said that it stops: one whose worker goes before would wait for it forever.
   * Never throws.
   */
  async dismiss (error: string): Promise<void> {
    const { silenceMs, signal } = this.#options
    await Promise.allSettled(this.#repliers.map(async replier => {
      for (let stopped = false; !stopped;) {
        if (replier.owes) replier.reply(error)
        stopped = isStop(await replier.receive(silenceMs, signal))
        // verl's waits for an answer to its last bucket too.
        if (stopped && replier.owes) replier.reply(error)
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
    // A handle, or what nobody can read.
    return false
  }
}
