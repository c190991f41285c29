import type { StreamPiece, WeightStream } from '../contract/weight-stream.ts'
import type { Access } from '../native/addon.ts'
import { allOf } from './all-of.ts'
import type { Link } from './remote-link.ts'

export interface ParameterStreamOptions {
  links: readonly Link[]
  /** Bytes of all tensors. */
  bytes: number
  /** Starts the sender, and meets it. */
  begin: () => Promise<void>
  /** Receives the parameters of a rank into a set of weights. */
  receive: (link: Link, rank: number, set: number) => Promise<void>
}

/** All parameters of an engine with equal shards, each rank's over its own link, straight into the weights. */
export class ParameterStream implements WeightStream {
  readonly #options: ParameterStreamOptions
  #access: Access = {}
  #touched = false

  constructor (options: ParameterStreamOptions) {
    this.#options = options
  }

  get touched (): boolean {
    return this.#touched
  }

  /** The sender starts when the weights can be written: it would spin on its GPUs until then. */
  async ready (): Promise<void> {}

  prepare (_job: unknown, access: Access): void {
    this.#access = access
  }

  async next (): Promise<StreamPiece | undefined> {
    if (this.#touched) return undefined
    const { links, bytes, begin, receive } = this.#options
    await begin()
    this.#touched = true
    await allOf(
      links.map(async (link, rank) => {
        await receive(link, rank, this.#access.set ?? 0)
      }),
      reason => {
        for (const link of links) link.abort(reason)
      }
    )
    return { begin: 0, length: bytes, source: null }
  }
}
