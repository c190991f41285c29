import { errorMessage, RefitError } from '../../errors.ts'
import type { NativeAddon } from '../../native/addon.ts'
import { readTensorBody } from '../../wire/torch/body.ts'
import type { TensorRequestBody } from '../../wire/torch/body.ts'
import { readHandleLists } from '../../wire/torch/handle-lists.ts'
import type { HandleLists } from '../../wire/torch/handle-lists.ts'
import { readHandle } from '../../wire/trainers/handle.ts'
import { readOfferBody } from '../../wire/torch/offer.ts'
import { decodePayload } from '../../wire/torch/payload.ts'
import { readPlain } from '../../wire/torch/plain.ts'
import type { PlainValue } from '../../wire/torch/plain.ts'
import { findStorages } from '../../wire/torch/find-storages.ts'
import { payloadError } from '../../wire/torch/tensor.ts'
import type { TensorStorage } from '../../wire/torch/tensor.ts'
import { announceTensors } from '../announce-tensors.ts'
import { announceLists, nameOfFirst, packAnnounced } from './announced-columns.ts'
import { referencesOf, referencesOfLists } from './handle-references.ts'
import type { HandleReferences } from './handle-references.ts'
import type { FromHandleThread, HeldSources, ToHandleThread } from './handle-messages.ts'
import { RequestHandles } from './request-handles.ts'
import type { OpenedSources, ReleasedCounts } from './request-handles.ts'
import type { VisibleGpus } from './visible-gpus.ts'

type Announce = Extract<ToHandleThread, { type: 'announce' }>
/** Requests that carry tensors. */
type LoadRequest = Extract<ToHandleThread, { type: 'announce' | 'open' | 'unpickle' | 'handle' | 'offer' }>
export type PoolRequest = Exclude<ToHandleThread, { type: 'end' }>

/** A body that was read: its references, and how the rest is opened. */
interface Read {
  references: HandleReferences
  spares?: HandleReferences
  open: (handles: RequestHandles) => FromHandleThread
  /** The name of the first tensor in a storage or segment that was refused. */
  nameOf: (cause: unknown) => string | undefined
}

/**
 * Decodes trainers' payloads, opens the memory of their handles, and releases the references. Each thread that does
 * this has a pool of its own.
 */
export class HandlePool {
  readonly #addon: NativeAddon
  readonly #gpus: VisibleGpus | null
  readonly #open = new Map<number, RequestHandles>()

  /** `gpus`: null for an engine on the CPU. */
  constructor (addon: NativeAddon, gpus: VisibleGpus | null) {
    this.#addon = addon
    this.#gpus = gpus
  }

  handle (message: PoolRequest): FromHandleThread {
    const { id } = message
    switch (message.type) {
      case 'announce':
      case 'open':
      case 'unpickle':
      case 'handle':
      case 'offer':
        return this.#receive(message)
      case 'release': {
        const released = this.#open.get(message.of)?.release() ?? { handles: 0, files: 0 }
        this.#open.delete(message.of)
        return { type: 'released', id, released }
      }
      case 'look':
        return { type: 'looked', id, gone: this.#open.get(message.of)?.findGone() ?? null }
      case 'discard':
        return {
          type: 'released',
          id,
          released: this.#giveBack(referencesOf(findStorages(message.entries, {}, message.gpus)))
        }
      case 'drop': {
        const released = message.references.map(references => this.#giveBack(references))
        return {
          type: 'released',
          id,
          released: { handles: released.reduce((sum, { handles }) => sum + handles, 0), files: 0 }
        }
      }
    }
  }

  /** Releases all that is still open. */
  close (): void {
    for (const handles of this.#open.values()) handles.release()
    this.#open.clear()
  }

  #receive (message: LoadRequest): FromHandleThread {
    const { id } = message
    const isOwn = !('borrowed' in message && message.borrowed === true)
    let read: Read | undefined
    let handles: RequestHandles | undefined
    try {
      read = this.#read(message)
      handles = isOwn
        ? new RequestHandles(read.references, this.#addon, this.#gpus, read.spares)
        : new RequestHandles(NO_REFERENCES, this.#addon, this.#gpus)
      const reply = read.open(handles)
      this.#open.set(id, handles)
      if (isOwn) this.#discardRest(message)
      return reply
    } catch (error) {
      const { code, message: text, param } = toRefusal(error, read)
      // A payload that cannot be read has no references.
      const released = handles?.release() ?? this.#giveBack(isOwn ? referencesOf(storagesOf(message)) : NO_REFERENCES)
      if (handles !== undefined && isOwn) this.#discardRest(message)
      return { type: 'refused', id, code, message: text, param, released, taken: handles?.taken ?? [] }
    }
  }

  #read (message: LoadRequest): Read {
    if (message.type === 'announce') return this.#readWeights(message)
    const { id } = message
    const { body, value } = decode(message)
    const { ranks, storages } = body
    return readOf(body, held => ({ type: 'opened', id, body: { ranks, storages }, ...held, value }))
  }

  #readWeights (message: Announce): Read {
    const { id } = message
    // The addon reads only names of weights.
    const lists = this.#gpus === null || message.isAdapter === true || message.loadFormat === 'flattened_bucket'
      ? null
      : this.#readLists(message)
    if (lists !== null) {
      const { columns, segments } = lists.gpus
      const references = referencesOfLists(lists.gpus)
      return {
        references,
        nameOf: cause => nameOfFirst(columns, segments.indexOf(cause as HandleLists['segments'][number])),
        open: handles => {
          const { sourceOf, ...sources } = handles.openSegments(segments)
          return {
            type: 'announced',
            id,
            tensors: announceLists(columns, sourceOf, lists.ranks),
            references: [references],
            ...sources,
            taken: handles.taken
          }
        }
      }
    }
    const body = readTensorBody(message, { isAdapter: message.isAdapter === true })
    return readOf(body, ({ sourceOf, ...held }) => {
      const tensors = announceTensors(
        body.ranks,
        new Map(body.storages.map((storage, index) => [storage, sourceOf[index]!]))
      )
      return { type: 'announced', id, tensors: packAnnounced(tensors), ...held }
    })
  }

  /** Null for all but lists of whole CUDA tensors. `ranks`: the ranks that load each list. */
  #readLists ({ entries, ranks }: Announce): { gpus: HandleLists, ranks: number[][] } | null {
    if (entries.length === 0 || (entries.length !== 1 && entries.length < ranks)) return null
    const ranksOf = new Map<string | Uint8Array, number[]>()
    for (let rank = 0; rank < ranks; rank++) {
      const entry = entries[entries.length === 1 ? 0 : rank]!
      const own = ranksOf.get(entry)
      if (own === undefined) ranksOf.set(entry, [rank])
      else own.push(rank)
    }
    try {
      const gpus = readHandleLists(this.#addon, [...ranksOf.keys()].map(entry => decodePayload(entry)))
      return gpus === null ? null : { gpus, ranks: [...ranksOf.values()] }
    } catch {
      return null
    }
  }

  /** Entries beyond the ranks are not read, but their senders hold references for them too. */
  #discardRest (message: LoadRequest): void {
    if (message.type !== 'open' && message.type !== 'announce') return
    const { entries, ranks } = message
    if (entries.length <= Math.max(ranks, 1) || entries.length === 1) return
    const read = new Set(entries.slice(0, ranks))
    this.#giveBack(referencesOf(findStorages(entries.slice(ranks).filter(entry => !read.has(entry)))))
  }

  #giveBack (references: HandleReferences): ReleasedCounts {
    return new RequestHandles(references, this.#addon, this.#gpus).release()
  }
}

const NO_REFERENCES: HandleReferences = { files: new Map(), counters: new Map() }

/** The storages of a body that could not be read. */
function storagesOf (message: LoadRequest): TensorStorage[] {
  if (message.type === 'open' || message.type === 'announce') return findStorages(message.entries)
  if (message.type === 'offer') return findStorages([message.entry], {}, message.gpus)
  return findStorages([message.bytes])
}

function decode (message: Exclude<LoadRequest, Announce>): { body: TensorRequestBody, value: PlainValue } {
  if (message.type === 'open') return { body: readTensorBody(message, { anyDType: true }), value: null }
  if (message.type === 'offer') {
    return { body: readOfferBody(message.entry, message.offer, message.ranks, message.gpus), value: null }
  }
  if (message.type === 'handle') {
    return { body: readHandle(message.name, message.bytes, message.gpu ?? undefined), value: null }
  }
  const { value, ...body } = readPlain(message.bytes, message.classes, message.ranks, message.gpus)
  return { body, value }
}

/** `reply`: makes the reply once the body is open. */
function readOf (
  { ranks, storages, spares }: TensorRequestBody,
  reply: (held: HeldSources & Pick<OpenedSources, 'sourceOf'>) => FromHandleThread
): Read {
  const references = [referencesOf(storages), referencesOf(spares)] as const
  return {
    references: references[0],
    spares: references[1],
    nameOf: cause => ranks.flat().find(({ storage }) => storage === cause)?.name,
    open: handles => {
      const opened = handles.openStorages(storages)
      return reply({ ...opened, references: [...references], taken: handles.taken })
    }
  }
}

/** Adds the name of the tensor in the refused memory. */
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
