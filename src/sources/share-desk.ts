import { RefitError } from '../errors.ts'
import type { NativeAddon } from '../native.ts'
import { readTensorBody } from '../wire/torch-body.ts'
import type { TensorRequestBody } from '../wire/torch-body.ts'
import { readHandle } from '../wire/torch-handle.ts'
import { readOfferBody } from '../wire/torch-offer.ts'
import { unpackTensorBody } from '../wire/torch-packed.ts'
import { readPlain } from '../wire/torch-plain.ts'
import type { PlainValue } from '../wire/torch-plain.ts'
import { readShares } from '../wire/torch-shares.ts'
import { payloadError } from '../wire/torch-tensor.ts'
import type { TensorStorage } from '../wire/torch-tensor.ts'
import type { FromShares, ToShares } from './share-messages.ts'
import { TensorShares } from './tensor-shares.ts'
import type { RequestShares, ShareCounts } from './tensor-shares.ts'
import type { VisibleCards } from './visible-cards.ts'

type Open = Extract<ToShares, { type: 'open' }>
type Unpickle = Extract<ToShares, { type: 'unpickle' }>
type Handle = Extract<ToShares, { type: 'handle' }>
type Offered = Extract<ToShares, { type: 'offer' }>
/** What brings tensors. */
type Bringing = Open | Unpickle | Handle | Offered
export type Asked = Exclude<ToShares, { type: 'end' }>

/** Decodes what trainers post, opens the memory that it names, and gives the references back. One on each thread that does. */
export class ShareDesk {
  readonly #addon: NativeAddon
  readonly #cards: VisibleCards | null
  readonly #open = new Map<number, TensorShares>()

  /** `cards`: null for an engine on the CPU. */
  constructor (addon: NativeAddon, cards: VisibleCards | null) {
    this.#addon = addon
    this.#cards = cards
  }

  handle (message: Asked): FromShares {
    const { id } = message
    switch (message.type) {
      case 'open':
      case 'unpickle':
      case 'handle':
      case 'offer': return this.#receive(message)
      case 'release': {
        const released = this.#open.get(message.of)?.release() ?? { shares: 0, files: 0 }
        this.#open.delete(message.of)
        return { type: 'released', id, released }
      }
      case 'look': return { type: 'looked', id, gone: this.#open.get(message.of)?.findGone() ?? null }
      case 'discard': return { type: 'released', id, released: this.#giveBack({ storages: readShares(message.entries, {}, message.cards) }) }
      case 'drop': return { type: 'released', id, released: this.#giveBack(unpackTensorBody(message.body)) }
    }
  }

  /** Gives back what is open still. */
  close (): void {
    for (const shares of this.#open.values()) shares.release()
    this.#open.clear()
  }

  #receive (message: Bringing): FromShares {
    const { id } = message
    let body: TensorRequestBody | undefined
    let shares: TensorShares | undefined
    try {
      const read = decode(message)
      body = read.body
      shares = new TensorShares(body, this.#addon, this.#cards)
      const { fds, segments, sourceOf } = shares.open()
      const spares = body.spares.length === 0 ? null : { ranks: [], storages: body.spares }
      this.#open.set(id, shares)
      this.#discardRest(message)
      return { type: 'opened', id, body, spares, fds, segments, taken: shares.taken, sourceOf, value: read.value }
    } catch (error) {
      const { code, message: text, param } = toRefusal(error, body)
      // What could not be read shares nothing.
      const released = shares?.release() ?? this.#giveBack({ storages: sharedBy(message) })
      if (shares !== undefined) this.#discardRest(message)
      return { type: 'refused', id, code, message: text, param, released, taken: shares?.taken ?? [] }
    }
  }

  /** Entries beyond the ranks are not read, but were shared like the others. */
  #discardRest (message: Bringing): void {
    if (message.type !== 'open') return
    const { entries, ranks } = message
    if (entries.length <= Math.max(ranks, 1) || entries.length === 1) return
    const read = new Set(entries.slice(0, ranks))
    this.#giveBack({ storages: readShares(entries.slice(ranks).filter(entry => !read.has(entry))) })
  }

  #giveBack (shares: RequestShares): ShareCounts {
    return new TensorShares(shares, this.#addon, this.#cards).release()
  }
}

/** What a body that could not be read shares. */
function sharedBy (message: Bringing): TensorStorage[] {
  if (message.type === 'open') return readShares(message.entries)
  if (message.type === 'offer') return readShares([message.entry], {}, message.cards)
  return readShares([message.bytes])
}

function decode (message: Bringing): { body: TensorRequestBody, value: PlainValue } {
  if (message.type === 'open') return { body: readTensorBody(message, message), value: null }
  if (message.type === 'offer') return { body: readOfferBody(message.entry, message.offer, message.ranks, message.cards), value: null }
  if (message.type === 'handle') return { body: readHandle(message.name, message.bytes, message.card ?? undefined), value: null }
  const { value, ...body } = readPlain(message.bytes, message.classes, message.ranks, message.cards)
  return { body, value }
}

/** Names the tensor that lies in the storage at fault. */
function toRefusal (error: unknown, body: TensorRequestBody | undefined): RefitError {
  if (!(error instanceof RefitError)) return new RefitError('INTERNAL', `the payload could not be read: ${error instanceof Error ? error.message : String(error)}`)
  const tensor = error.cause === undefined ? undefined : body?.ranks.flat().find(({ storage }) => storage === error.cause)
  if (tensor === undefined) return error
  const { message, param } = payloadError(error.message, tensor.name)
  return new RefitError(error.code, message, param === undefined ? {} : { param })
}
