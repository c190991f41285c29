import type { Tensor } from '../checkpoint.ts'
import { NoReply } from '../http-target.ts'
import type { Reply } from '../http-target.ts'
import type { BroadcastLists, Server } from '../servers/server.ts'
import { GlooSender } from './gloo-sender.ts'
import type { HeldUpdate, SendOptions, Transport } from './transport.ts'

export interface DistributedOptions {
  ranks: number
  /** The address at which the server reaches this machine. */
  address: string
}

/** How long a broadcast may go on after the server has replied. */
const AFTER_REPLY_MS = 5000
let made = 0

/** Broadcasts over gloo, in a group of this process and the server's ranks. */
export class DistributedTransport implements Transport {
  readonly name = 'distributed'
  missing?: string
  readonly takesParts = true
  readonly #server: Server
  readonly #options: DistributedOptions
  #sender: GlooSender | undefined

  constructor (server: Server, options: DistributedOptions) {
    this.#server = server
    this.#options = options
  }

  async send (tensors: readonly Tensor[], options: SendOptions = {}): Promise<Reply> {
    return await this.sendAs(listsOf(tensors), tensors, options)
  }

  /** Announces `lists`, which may be lies, and broadcasts the tensors. */
  async sendAs (lists: BroadcastLists, tensors: readonly Tensor[], options: SendOptions = {}): Promise<Reply> {
    const joined = await this.#join()
    if (!(joined instanceof GlooSender)) return joined
    const held = this.#announce(joined, lists, tensors, options)
    const sent = held.release(tensors.length).then(() => true, () => false)
    const reply = await held.reply.catch(async error => {
      await held.kill()
      throw error
    })
    // A refused update may leave the other side of the broadcast unread.
    const late = new Promise<boolean>(resolve => setTimeout(resolve, AFTER_REPLY_MS, false).unref())
    if (!await Promise.race([sent, late])) await held.kill()
    return reply
  }

  async hold (tensors: readonly Tensor[], options: SendOptions = {}): Promise<HeldUpdate> {
    const joined = await this.#join()
    if (!(joined instanceof GlooSender)) throw new NoReply(`the group could not be made: ${joined.text}`)
    return this.#announce(joined, listsOf(tensors), tensors, options)
  }

  /** A sender in a group with the server, or the server's refusal of the group. */
  async #join (): Promise<GlooSender | Reply> {
    if (this.#sender !== undefined) return this.#sender
    const sender = await this.start()
    const joining = sender.join(this.#server.target.patienceMs).catch((error: Error) => error)
    const reply = await this.init(sender).catch((error: Error) => error)
    if (reply instanceof Error || !reply.ok) {
      await sender.kill()
      await joining
      if (reply instanceof Error) throw reply
      return reply
    }
    const error = await joining
    if (error instanceof Error) {
      await sender.kill()
      throw new NoReply(`the group was not made: ${error.message}`, { cause: error })
    }
    this.#sender = sender
    return sender
  }

  /** A sender whose group does not exist yet. */
  async start (options: { port?: number, name?: string } = {}): Promise<GlooSender> {
    const { ranks, address } = this.#options
    return await GlooSender.start({
      name: `conformance-${process.pid}-${made++}`,
      size: 1 + ranks,
      host: address,
      ...options
    })
  }

  /** Asks the server to join the sender's group. */
  async init ({ name, size, host, store }: GlooSender, timeoutMs?: number): Promise<Reply> {
    return await this.#server.initGroup({ address: host, port: store.address.port, worldSize: size, name }, timeoutMs)
  }

  #announce (
    sender: GlooSender,
    lists: BroadcastLists,
    tensors: readonly Tensor[],
    { label }: SendOptions
  ): HeldUpdate {
    const reply = this.#server.receive(sender.name, lists, label)
    reply.catch(() => {})
    let sent = 0
    return {
      release: async count => {
        for (const { bytes } of tensors.slice(sent, sent += count)) {
          await sender.broadcast(bytes(), this.#server.target.patienceMs)
        }
      },
      kill: async () => {
        if (this.#sender === sender) this.#sender = undefined
        await sender.kill()
      },
      reply
    }
  }

  /** Leaves the group. */
  async close (): Promise<void> {
    const sender = this.#sender
    this.#sender = undefined
    if (sender === undefined) return
    await this.#server.destroyGroup(sender.name).catch(() => {})
    await sender.end()
  }
}

export function listsOf (tensors: readonly Tensor[]): BroadcastLists {
  return {
    names: tensors.map(({ name }) => name),
    dtypes: tensors.map(({ dtype }) => dtype),
    shapes: tensors.map(({ shape }) => shape)
  }
}
