import { errorMessage, RefitError } from '../../errors.ts'
import type { NativeAddon } from '../../native/addon.ts'
import { readTensorBody } from '../../wire/torch/body.ts'
import type { TensorRequestBody } from '../../wire/torch/body.ts'
import { readCardLists } from '../../wire/torch/columns.ts'
import type { CardLists } from '../../wire/torch/columns.ts'
import { readHandle } from '../../wire/torch/handle.ts'
import { readOfferBody } from '../../wire/torch/offer.ts'
import { decodePayload } from '../../wire/torch/payload.ts'
import { readPlain } from '../../wire/torch/plain.ts'
import type { PlainValue } from '../../wire/torch/plain.ts'
import { readShares } from '../../wire/torch/shares.ts'
import { payloadError } from '../../wire/torch/tensor.ts'
import type { TensorStorage } from '../../wire/torch/tensor.ts'
import { announceTensors } from '../announce-tensors.ts'
import { announceLists, nameOfFirst, packAnnounced } from './announced-columns.ts'
import { referencesOf, referencesOfLists } from './share-references.ts'
import type { ShareReferences } from './share-references.ts'
import type { FromShares, HeldSources, ToShares } from './share-messages.ts'
import { TensorShares } from './tensor-shares.ts'
import type { OpenedSources, ShareCounts } from './tensor-shares.ts'
import type { VisibleGpus } from './visible-gpus.ts'

type Announce = Extract<ToShares, { type: 'announce' }>
/** What brings tensors. */
type Bringing = Extract<ToShares, { type: 'announce' | 'open' | 'unpickle' | 'handle' | 'offer' }>
export type Asked = Exclude<ToShares, { type: 'end' }>

/** What a body brings, read: its references, and how the rest is opened. */
interface Read {
  references: ShareReferences
  spares?: ShareReferences
  open: (shares: TensorShares) => FromShares
  /** The name of the first tensor in a storage or segment that was refused. */
  nameOf: (cause: unknown) => string | undefined
}

/** Decodes what trainers post, opens the memory that it names, and gives the references back. One on each thread that does. */
export class ShareDesk {
  readonly #addon: NativeAddon
  readonly #cards: VisibleGpus | null
  readonly #open = new Map<number, TensorShares>()

  /** `cards`: null for an engine on the CPU. */
  constructor (addon: NativeAddon, cards: VisibleGpus | null) {
    this.#addon = addon
    this.#cards = cards
  }

  handle (message: Asked): FromShares {
    const { id } = message
    switch (message.type) {
      case 'announce':
      case 'open':
      case 'unpickle':
      case 'handle':
      case 'offer':
        return this.#receive(message)
      case 'release': {
        const released = this.#open.get(message.of)?.release() ?? { shares: 0, files: 0 }
        this.#open.delete(message.of)
        return { type: 'released', id, released }
      }
      case 'look':
        return { type: 'looked', id, gone: this.#open.get(message.of)?.findGone() ?? null }
      case 'discard':
        return {
          type: 'released',
          id,
          released: this.#giveBack(referencesOf(readShares(message.entries, {}, message.cards)))
        }
      case 'drop': {
        const released = message.references.map(references => this.#giveBack(references))
        return {
          type: 'released',
          id,
          released: { shares: released.reduce((sum, { shares }) => sum + shares, 0), files: 0 }
        }
      }
    }
  }

  /** Gives back what is open still. */
  close (): void {
    for (const shares of this.#open.values()) shares.release()
    this.#open.clear()
  }

  #receive (message: Bringing): FromShares {
    const { id } = message
    let read: Read | undefined
    let shares: TensorShares | undefined
    try {
      read = this.#read(message)
      shares = new TensorShares(read.references, this.#addon, this.#cards, read.spares)
      const reply = read.open(shares)
      this.#open.set(id, shares)
      this.#discardRest(message)
      return reply
    } catch (error) {
      const { code, message: text, param } = toRefusal(error, read)
      // What could not be read shares nothing.
      const released = shares?.release() ?? this.#giveBack(referencesOf(sharedBy(message)))
      if (shares !== undefined) this.#discardRest(message)
      return { type: 'refused', id, code, message: text, param, released, taken: shares?.taken ?? [] }
    }
  }

  #read (message: Bringing): Read {
    if (message.type === 'announce') return this.#readWeights(message)
    const { id } = message
    const { body, value } = decode(message)
    const { ranks, storages } = body
    return readOf(body, held => ({ type: 'opened', id, body: { ranks, storages }, ...held, value }))
  }

  #readWeights (message: Announce): Read {
    const { id } = message
    const lists = this.#cards === null || message.loadFormat === 'flattened_bucket' ? null : this.#readLists(message)
    if (lists !== null) {
      const { columns, segments } = lists.cards
      const references = referencesOfLists(lists.cards)
      return {
        references,
        nameOf: cause => nameOfFirst(columns, segments.indexOf(cause as CardLists['segments'][number])),
        open: shares => {
          const { sourceOf, ...sources } = shares.openSegments(segments)
          return {
            type: 'announced',
            id,
            tensors: announceLists(columns, sourceOf, lists.ranks),
            references: [references],
            ...sources,
            taken: shares.taken
          }
        }
      }
    }
    const body = readTensorBody(message)
    return readOf(body, ({ sourceOf, ...held }) => {
      const tensors = announceTensors(
        body.ranks,
        new Map(body.storages.map((storage, index) => [storage, sourceOf[index]!]))
      )
      return { type: 'announced', id, tensors: packAnnounced(tensors), ...held }
    })
  }

  /** Null for all but lists of whole tensors of cards. `ranks`: who is brought each list. */
  #readLists ({ entries, ranks }: Announce): { cards: CardLists, ranks: number[][] } | null {
    if (entries.length === 0 || (entries.length !== 1 && entries.length < ranks)) return null
    const ranksOf = new Map<string | Uint8Array, number[]>()
    for (let rank = 0; rank < ranks; rank++) {
      const entry = entries[entries.length === 1 ? 0 : rank]!
      const own = ranksOf.get(entry)
      if (own === undefined) ranksOf.set(entry, [rank])
      else own.push(rank)
    }
    try {
      const cards = readCardLists(this.#addon, [...ranksOf.keys()].map(entry => decodePayload(entry)))
      return cards === null ? null : { cards, ranks: [...ranksOf.values()] }
    } catch {
      return null
    }
  }

  /** Entries beyond the ranks are not read, but were shared like the others. */
  #discardRest (message: Bringing): void {
    if (message.type !== 'open' && message.type !== 'announce') return
    const { entries, ranks } = message
    if (entries.length <= Math.max(ranks, 1) || entries.length === 1) return
    const read = new Set(entries.slice(0, ranks))
    this.#giveBack(referencesOf(readShares(entries.slice(ranks).filter(entry => !read.has(entry)))))
  }

  #giveBack (references: ShareReferences): ShareCounts {
    return new TensorShares(references, this.#addon, this.#cards).release()
  }
}

/** What a body that could not be read shares. */
function sharedBy (message: Bringing): TensorStorage[] {
  if (message.type === 'open' || message.type === 'announce') return readShares(message.entries)
  if (message.type === 'offer') return readShares([message.entry], {}, message.cards)
  return readShares([message.bytes])
}

function decode (message: Exclude<Bringing, Announce>): { body: TensorRequestBody, value: PlainValue } {
  if (message.type === 'open') return { body: readTensorBody(message, { anyDType: true }), value: null }
  if (message.type === 'offer') {
    return { body: readOfferBody(message.entry, message.offer, message.ranks, message.cards), value: null }
  }
  if (message.type === 'handle') {
    return { body: readHandle(message.name, message.bytes, message.card ?? undefined), value: null }
  }
  const { value, ...body } = readPlain(message.bytes, message.classes, message.ranks, message.cards)
  return { body, value }
}

/** `reply`: what is said of the body once it is open. */
function readOf (
  { ranks, storages, spares }: TensorRequestBody,
  reply: (held: HeldSources & Pick<OpenedSources, 'sourceOf'>) => FromShares
): Read {
  const references = [referencesOf(storages), referencesOf(spares)] as const
  return {
    references: references[0],
    spares: references[1],
    nameOf: cause => ranks.flat().find(({ storage }) => storage === cause)?.name,
    open: shares => {
      const opened = shares.openStorages(storages)
      return reply({ ...opened, references: [...references], taken: shares.taken })
    }
  }
}

/** Names the tensor that lies in what was refused. */
function toRefusal (error: unknown, read: Read | undefined): RefitError {
  if (!(error instanceof RefitError)) {
    return new RefitError(
      'INTERNAL',
      `the payload could not be read: ${errorMessage(error)}`
    )
  }
  const tensor = error.cause === undefined ? undefined : read?.nameOf(error.cause)
  if (tensor === undefined) return error
  const { message, param } = payloadError(error.message, tensor)
  return new RefitError(error.code, message, param === undefined ? {} : { param })
}
