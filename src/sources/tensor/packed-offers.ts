import { RefitError } from '../../errors.ts'
import { offeredExports, readOfferBody } from '../../wire/torch/offer.ts'
import type { Offer } from '../../wire/torch/offer.ts'
import type { TensorStorage } from '../../wire/torch/tensor.ts'
import type { WeightSource } from '../../contract/weight-source.ts'
import { announceTensors } from '../announce-tensors.ts'
import type { KeptTensors } from './kept-tensors.ts'
import type { TensorReceiver } from './tensor-receiver.ts'

/** The name under which the buffer is kept (docs/tensor-updates.md). */
const NAME = 'vllm ipc'

export interface PackedOffersOptions {
  tensors: Pick<TensorReceiver, 'openOffer'>
  kept: KeptTensors
  ranks: number
  /** UUIDs of the ranks' GPUs. */
  gpus: readonly string[]
}

/** One export of a sender's buffer for each of our GPUs, and its index among the kept sources. */
interface Held {
  generation: number
  sourceOf: ReadonlyMap<string, number>
}

/**
 * A sender packs chunks of weights into one buffer again and again: it exports the buffer once and sends the same
 * handle with each chunk. One export counts one reference, which may be released once (torch's reference counter). So
 * the mapping is kept from the first chunk until the update ends or another buffer comes.
 */
export class PackedOffers {
  readonly #options: PackedOffersOptions
  #held: Held | undefined
  #generation = 0
  /** Chunks come one after another, but a client that retries may send two at once. */
  #turn: Promise<unknown> = Promise.resolve()

  constructor (options: PackedOffersOptions) {
    this.#options = options
  }

  /**
   * Writes one chunk with `apply`. Throws like TensorReceiver.open, TENSOR_PAYLOAD if the sender has ended, and the
   * error of `apply`.
   */
  async write<T> (entry: string, offer: Offer, apply: (source: WeightSource) => Promise<T>): Promise<T> {
    return await this.#inTurn(async () => {
      if (!this.holds(entry)) return await this.#first(entry, offer, apply)
      try {
        return await this.#again(this.#held!, entry, offer, apply)
      } catch (error) {
        // /release_kept_tensors has released it. It cannot be opened again, because its reference is gone.
        if (
          error instanceof RefitError && (error.code === 'NOT_FOUND' || error.code === 'TENSOR_PAYLOAD') &&
          error.param === 'kept'
        ) this.#held = undefined
        throw error
      }
    })
  }

  /** True if the entry's exports are held already: a refused chunk must not release their references. */
  holds (entry: string): boolean {
    const exports = offeredExports(entry, this.#options.gpus)
    return this.#held !== undefined && exports.length > 0 && exports.every(key => this.#held!.sourceOf.has(key))
  }

  /** The sender does not need the buffer any more. */
  async end (): Promise<void> {
    await this.#inTurn(async () => {
      if (this.#held === undefined) return
      this.#held = undefined
      await this.#options.kept.release(NAME)
    })
  }

  async #first<T> (entry: string, offer: Offer, apply: (source: WeightSource) => Promise<T>): Promise<T> {
    const { tensors, kept } = this.#options
    const { source, sourceOf } = await tensors.openOffer(entry, offer)
    const generation = ++this.#generation
    return await kept.keep({ name: NAME, generation }, source, async kept => {
      this.#held = {
        generation,
        sourceOf: new Map(
          [...sourceOf].flatMap(([storage, index]) =>
            storage.kind === 'cuda' ? [[exportOf(storage), index] as const] : []
          )
        )
      }
      return await apply(kept)
    }, true)
  }

  async #again<T> (
    { generation, sourceOf }: Held,
    entry: string,
    offer: Offer,
    apply: (source: WeightSource) => Promise<T>
  ): Promise<T> {
    const { kept, ranks, gpus } = this.#options
    const body = readOfferBody(entry, offer, ranks, gpus)
    const fileOf = new Map(
      body.storages.flatMap(storage =>
        storage.kind === 'cuda' ? [[storage as TensorStorage, sourceOf.get(exportOf(storage))!] as const] : []
      )
    )
    return await kept.write({ name: NAME, generation }, apply, announceTensors(body.ranks, fileOf))
  }

  async #inTurn<T> (run: () => Promise<T>): Promise<T> {
    const turn = this.#turn.then(run, run)
    this.#turn = turn.catch(() => {})
    return await turn
  }
}

function exportOf ({ counterFile, counterSlot }: Extract<TensorStorage, { kind: 'cuda' }>): string {
  return `${counterFile}/${counterSlot}`
}
