import type { DeltaHost } from '../../contract/delta-host.ts'
import type { AnnouncedTensor } from '../../contract/weight-source.ts'
import { RefitError } from '../../errors.ts'
import type { NativeSource } from '../../native/write-job.ts'
import { decodePayload } from '../../wire/torch/payload.ts'
import type { PlainValue } from '../../wire/torch/plain.ts'
import type { TensorDescriptor, TensorStorage } from '../../wire/torch/tensor.ts'
import type { Offer } from '../../wire/torch/offer.ts'
import { announceTensors } from '../announce-tensors.ts'
import { AnnouncedReader } from './announced-columns.ts'
import { unpackSegments } from './cuda-segments.ts'
import { checkLoaders, loadTensors, unknownFormat } from './load-tensors.ts'
import type { HeldTensors } from './load-tensors.ts'
import type { HeldSources, SentEntries, ToHandleThread } from './handle-messages.ts'
import { filesOf } from './handle-references.ts'
import type { HandleReferences } from './handle-references.ts'
import { HandleThread, ThreadEnded } from './handle-thread.ts'
import type { ThreadLife, HandleTotals } from './handle-thread.ts'
import { isSharedMemory } from './shared-memory.ts'
import { TensorPatch, TensorSource } from './tensor.ts'
import type { HandleHold, TensorPatchParts, TensorSourceParts } from './tensor.ts'
import { VERL_DELTA, VerlDelta } from './verl-delta.ts'
import type { VisibleGpu } from './visible-gpus.ts'
import type { WeightLoader } from '../disk/weight-loader.ts'

type PoolRequestOf<T extends ToHandleThread['type']> = Omit<Extract<ToHandleThread, { type: T }>, 'id'>

const OWN_FORMATS = ['flattened_bucket', 'direct']
/** Characters of base64 and bytes of pickles that are read on the event loop: some 500 handles, 2 ms. */
const NEAR_BYTES = 256 << 10
/** Files of a sender that the event loop looks at itself: it takes less time than a message to a thread. */
const FEW_FILES = 8

export interface TensorPayload {
  /** `serialized_named_tensors`. */
  entries: readonly string[]
  loadFormat: string | null
  /** The references stay the sender's: another engine gives them back. */
  borrowed?: boolean | undefined
  /** Senders that each have an entry of their own (default: the engine's ranks have the entries). */
  senders?: number | undefined
}

/**
 * A tensor whose handle was sent on its own. `memory` is null for a tensor without elements. Closing the source gives
 * the handle back.
 */
export interface OpenHandle {
  tensor: TensorDescriptor
  memory: NativeSource | null
  source: Pick<TensorSource, 'verify' | 'rest' | 'close'>
}

export interface TensorReceiverOptions {
  /** Tensor-parallel ranks. */
  ranks: number
  /** UUIDs of the ranks' GPUs; none on the CPU. */
  gpus?: readonly string[]
  /** The GPUs whose memory can be read; null, the default, if none can. */
  visible?: readonly VisibleGpu[] | null
  /** Reads deltas. Without it, deltas are refused. */
  deltas?: DeltaHost | undefined
  /** By `load_format`. */
  loaders?: Readonly<Record<string, WeightLoader>>
  /** Bodies up to this size are read on the event loop (default 256 KiB), larger ones on a thread. */
  nearBytes?: number
  /** Start the thread before a body needs it, and compile its code (default false). */
  warmUp?: boolean
}

type Opened<T extends { closed: unknown }> = Omit<T, 'closed'> & Partial<Pick<T, 'closed'>>

/** Opens the memory of trainers' handles. Large bodies are read on a thread of their own. */
export class TensorReceiver {
  readonly #options: Required<Omit<TensorReceiverOptions, 'loaders' | 'deltas'>>
  readonly #deltas: VerlDelta | undefined
  readonly #loaders: ReadonlyMap<string, WeightLoader>
  readonly #thread: HandleThread
  readonly #reader = new AnnouncedReader()
  readonly #open = new Set<TensorSource | TensorPatch>()
  #closed = false

  constructor ({ loaders = {}, deltas, ...options }: TensorReceiverOptions) {
    this.#deltas = deltas === undefined ? undefined : new VerlDelta(deltas)
    this.#options = { gpus: [], visible: null, nearBytes: NEAR_BYTES, warmUp: false, ...options }
    this.#loaders = checkLoaders(loaders)
    this.#thread = new HandleThread({ visible: this.#options.visible, warmUp: this.#options.warmUp })
  }

  get counts (): Readonly<HandleTotals> {
    return this.#thread.totals
  }

  /** With `warmUp`, starts the thread, so that the first request need not wait for it. */
  start (): void {
    if (this.#options.warmUp && !this.#closed) this.#thread.start()
  }

  /**
   * Decodes a payload and opens all of it. After a refusal nothing is open, and the sender's references are released.
   * Throws INVALID_REQUEST, PICKLE_MALFORMED, PICKLE_REFUSED, PICKLE_LIMIT, TENSOR_PAYLOAD, UNSUPPORTED or
   * WEIGHT_LOADER.
   */
  async open (payload: TensorPayload): Promise<TensorSource | TensorPatch> {
    const { entries, loadFormat, borrowed = false } = payload
    if (loadFormat === 'direct' && entries.length === 1 && this.#options.ranks > 1) {
      if (!borrowed) await this.discard(entries)
      throw new RefitError(
        'INVALID_REQUEST',
        'serialized_named_tensors has one entry; with load_format "direct" every tensor-parallel rank ' +
          `(${this.#options.ranks}) is sent its own shards, in an entry of its own`,
        { param: 'serialized_named_tensors' }
      )
    }
    const loader = await this.#findLoader(payload)
    if (loader === undefined && loadFormat === VERL_DELTA) return await this.#openDelta(this.#deltas!, payload)
    if (loader === undefined) return await this.#openWeights(payload)
    const opened = await this.#openTensors(this.#entriesRequest('open', payload), entries)
    const { ranks, sources, sourceOf, hold } = await loadTensors(
      loadFormat!,
      loader,
      opened,
      async (bytes, classes) => await this.#openPickle(bytes, classes, borrowed)
    )
    try {
      return this.#sourceOf({ tensors: announceTensors(ranks, sourceOf), sources, layout: 'checkpoint', hold })
    } catch (error) {
      await hold.release()
      throw error
    }
  }

  /**
   * The same for the tensors of a LoRA adapter, which `open` refuses. `loadFormat` is null or "flattened_bucket".
   */
  async openAdapter (payload: TensorPayload): Promise<TensorSource> {
    const { entries, loadFormat, borrowed = false } = payload
    if (loadFormat === null || loadFormat === 'flattened_bucket') return await this.#openWeights(payload, true)
    if (!borrowed) await this.discard(entries)
    throw new RefitError(
      'UNSUPPORTED',
      `load_format: tensors of an adapter come as a list or as "flattened_bucket", got ${JSON.stringify(loadFormat)}`,
      { param: 'load_format' }
    )
  }

  /**
   * Opens one tensor whose handle was sent on its own; the caller decides which part of it is written. `gpu`: the UUID
   * under which it was sent; the sender's own index is ignored. Throws like `open`.
   */
  async openHandle (name: string, bytes: Uint8Array, gpu: string | null): Promise<OpenHandle> {
    const { ranks, sources, sourceOf, hold } = await this.#openTensors({ type: 'handle', name, bytes, gpu }, [bytes])
    const source = this.#sourceOf({ tensors: [], sources, layout: 'checkpoint', hold })
    const tensor = ranks[0]![0]!
    return { tensor, memory: sources[sourceOf.get(tensor.storage) ?? -1] ?? null, source }
  }

  /**
   * Opens the handles that each rank takes from an offer by GPU; handles for other GPUs are not touched. `sourceOf`:
   * the index of the source in which a storage lies. Throws as `open` does.
   */
  async openOffer (
    entry: string,
    offer: Offer
  ): Promise<{ source: TensorSource, sourceOf: ReadonlyMap<TensorStorage, number> }> {
    const { ranks: count, gpus } = this.#options
    const { ranks, sources, sourceOf, hold } = await this.#openTensors({
      type: 'offer',
      entry,
      offer,
      ranks: count,
      gpus
    }, [entry])
    try {
      return {
        source: this.#sourceOf({ tensors: announceTensors(ranks, sourceOf), sources, layout: 'checkpoint', hold }),
        sourceOf
      }
    } catch (error) {
      await hold.release()
      throw error
    }
  }

  /**
   * Releases the references of a body that is refused for another reason. `isOffer`: only those for our own GPUs.
   * Never throws.
   */
  async discard (entries: ReadonlyArray<string | Uint8Array>, isOffer = false): Promise<void> {
    if (this.#closed) return
    await this
      .#seen(entries, async life =>
        await this
          .#thread
          .request(life, { type: 'discard', entries, ...isOffer ? { gpus: this.#options.gpus } : {} }))
      .catch(() => {})
  }

  /** Ends the thread after the running writes, and releases all open handles. */
  async close (): Promise<void> {
    this.#closed = true
    await Promise.all([...this.#open].map(async source => {
      await source.revoke()
    }))
    await this.#thread.close()
  }

  async #openDelta (deltas: VerlDelta, payload: TensorPayload): Promise<TensorSource | TensorPatch> {
    const opened = await this.#openTensors(this.#entriesRequest('open', payload), payload.entries)
    try {
      const { tensors, patch, hooks } = await deltas.open(opened)
      return patch === undefined
        ? this.#sourceOf({ tensors, sources: opened.sources, layout: 'checkpoint', hold: opened.hold, ...hooks })
        : this.#patchOf({ tensors, patch, hold: opened.hold, ...hooks })
    } catch (error) {
      await opened.hold.release()
      throw error
    }
  }

  /** Undefined for refit's own formats and for deltas. */
  async #findLoader ({ entries, loadFormat, borrowed }: TensorPayload): Promise<WeightLoader | undefined> {
    if (loadFormat === null || OWN_FORMATS.includes(loadFormat)) return undefined
    const loader = this.#loaders.get(loadFormat)
    if (loader !== undefined || (loadFormat === VERL_DELTA && this.#deltas !== undefined)) return loader
    if (borrowed !== true) await this.discard(entries)
    throw unknownFormat(loadFormat, this.#loaders.keys())
  }

  async #openWeights (payload: TensorPayload, isAdapter = false): Promise<TensorSource> {
    const { entries, loadFormat } = payload
    const layout = loadFormat === 'direct' ? 'engine' : 'checkpoint'
    const request = {
      ...this.#entriesRequest('announce', { ...payload, entries: decodeEntries(entries) }),
      ...isAdapter ? { isAdapter } : {}
    }
    const { reply, sources, hold } = await this.#held(
      entries,
      async life => await this.#thread.request(life, request),
      payload.borrowed
    )
    const tensors = this.#reader.read(reply.tensors)
    return this.#sourceOf({ tensors: isAdapter ? firstOfEach(tensors) : tensors, sources, layout, hold })
  }

  #entriesRequest<T extends 'announce' | 'open'> (
    type: T,
    { entries, loadFormat, borrowed, senders }:
      & Pick<SentEntries, 'entries' | 'loadFormat' | 'borrowed'>
      & Pick<TensorPayload, 'senders'>
  ): { type: T } & SentEntries {
    const { ranks, gpus } = senders === undefined ? this.#options : { ranks: senders, gpus: [] }
    return { type, entries, loadFormat, ranks, gpus, borrowed }
  }

  /** A source that counts as open until it is closed. `closed`: called then as well. */
  #sourceOf ({ closed, ...parts }: Opened<TensorSourceParts>): TensorSource {
    const source: TensorSource = new TensorSource({ ...parts, closed: () => this.#ended(source, closed) })
    this.#open.add(source)
    return source
  }

  #patchOf ({ closed, ...parts }: Opened<TensorPatchParts>): TensorPatch {
    const source: TensorPatch = new TensorPatch({ ...parts, closed: () => this.#ended(source, closed) })
    this.#open.add(source)
    return source
  }

  #ended (source: TensorSource | TensorPatch, closed: () => unknown = () => {}): void {
    this.#open.delete(source)
    closed()
  }

  async #openPickle (
    bytes: Uint8Array,
    classes: readonly string[],
    borrowed: boolean
  ): Promise<HeldTensors & { value: PlainValue }> {
    const { ranks, gpus } = this.#options
    return await this.#openTensors({ type: 'unpickle', bytes, classes, ranks, gpus, borrowed }, [bytes])
  }

  /** The thread on which a body is read. */
  #lifeFor (entries: ReadonlyArray<string | Uint8Array>): ThreadLife {
    let bytes = 0
    for (const entry of entries) bytes += entry.length
    return bytes <= this.#options.nearBytes ? this.#thread.near() : this.#thread.start()
  }

  async #openTensors (
    request: PoolRequestOf<'open'> | PoolRequestOf<'unpickle'> | PoolRequestOf<'handle'> | PoolRequestOf<'offer'>,
    entries: SentEntries['entries']
  ): Promise<HeldTensors & { value: PlainValue }> {
    const { reply, sources, hold } = await this.#held(
      entries,
      async life => await this.#thread.request(life, request),
      'borrowed' in request ? request.borrowed : false
    )
    const { body: { ranks, storages }, sourceOf, value } = reply
    return {
      ranks,
      sources,
      sourceOf: new Map(storages.map((storage, index) => [storage, sourceOf[index]!])),
      hold,
      value
    }
  }

  /**
   * Sends a request that carries tensors. Returns the object that holds them until they are given back, and their
   * sources in the addon's form.
   */
  async #held<T extends HeldSources> (
    entries: SentEntries['entries'],
    send: (life: ThreadLife) => Promise<T & { id: number }>,
    borrowed = false
  ): Promise<{ reply: T, sources: NativeSource[], hold: HandleHold }> {
    return await this.#seen(entries, async life => {
      const reply = await send(life)
      const { id, fds, segments, references } = reply
      return {
        reply,
        sources: [...fds.map(fd => ({ fd })), ...unpackSegments(segments).map(segment => ({ segment }))],
        hold: this.#holdOf(life, id, borrowed ? [] : references)
      }
    })
  }

  /** If the thread ends at another request before it has seen this one, the next thread reads it. */
  async #seen<T> (entries: SentEntries['entries'], send: (life: ThreadLife) => Promise<T>): Promise<T> {
    for (let life = this.#lifeFor(entries);; life = this.#thread.start()) {
      try {
        return await send(life)
      } catch (error) {
        if (!(error instanceof ThreadEnded && error.unseen) || this.#closed) throw error
      }
    }
  }

  #holdOf (life: ThreadLife, of: number, references: readonly HandleReferences[]): HandleHold {
    const thread = this.#thread
    return {
      isOpen: () => !life.ended,
      findGone: async () => {
        const files = filesOf(references)
        if (!life.ended && files.length <= FEW_FILES) return files.find(file => !isSharedMemory(file)) ?? null
        return (await thread.request(life, { type: 'look', of })).gone
      },
      release: async () => {
        // A thread that ends closes its files. The references are still held, unless the thread was closed and released
        // them.
        if (!life.ended) await thread.request(life, { type: 'release', of }).catch(() => {})
        else if (!this.#closed) await thread.request(thread.start(), { type: 'drop', references }).catch(() => {})
      }
    }
  }
}

/**
 * The pickles of entries, each text once, because bytes go to another thread faster than text. Text that is not base64
 * stays as it is, for its reader to refuse.
 */
function decodeEntries (entries: readonly string[]): ReadonlyArray<string | Uint8Array> {
  const pickles = new Map<string, Uint8Array>()
  try {
    return entries.map(entry => {
      let pickle = pickles.get(entry)
      if (pickle === undefined) pickles.set(entry, pickle = decodePayload(entry))
      return pickle
    })
  } catch {
    return entries
  }
}

/** Each entry has the whole adapter, so the ranks read one of them. */
export function firstOfEach (tensors: readonly AnnouncedTensor[]): AnnouncedTensor[] {
  const seen = new Set<string>()
  return tensors.flatMap(({ ranks, ...tensor }) => {
    if (ranks === undefined) return [tensor]
    if (seen.has(tensor.name)) return []
    seen.add(tensor.name)
    return [tensor]
  })
}
