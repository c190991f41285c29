import { once } from 'node:events'
import { setTimeout as sleep } from 'node:timers/promises'
import { errorMessage, RefitError } from '../../errors.ts'
import { bytesOf } from '../../native/dtypes.ts'
import type { NativeSource } from '../../native/write-job.ts'
import type { StoredSource, WeightSource } from '../../contract/weight-source.ts'
import { TENSOR } from './tensor.ts'
import type { TensorPatch, TensorSource } from './tensor.ts'

/** The sender's name for tensors that are kept between requests. The generation identifies the sender's allocations. */
export interface KeptName {
  name: string
  generation: number
}

interface Kept extends KeptName {
  source: TensorSource
  /** The name under which a write keeps the mappings. It is never used twice. */
  mapping: string
  bytes: number
  /** A write has begun to open it. */
  isMapped: boolean
}

/** One name. Its requests run one at a time. */
interface Slot {
  kept: Kept | undefined
  turn: Promise<void>
  users: number
}

const MAX_NAMES = 8
/**
 * How long a reply waits for mappings to be closed. During another write they are closed at its end. Memory that is not
 * read may be given back earlier.
 */
const PATIENCE_MS = 1000

export interface KeptTensorsOptions {
  /** Closes the mappings that a write keeps open (`CudaSegment.keep`); engines without GPUs have none. */
  closeMappings?: ((mapping: string) => Promise<void>) | undefined
}

/**
 * Tensors that stay open between requests, so that another update from the same memory needs no handles. The mappings,
 * the decoded payload and the sender's references are kept under a name until it is replaced or released, or its sender
 * has ended.
 */
export class KeptTensors {
  readonly #closeMappings: KeptTensorsOptions['closeMappings']
  readonly #slots = new Map<string, Slot>()
  #serial = 0
  readonly #end = new AbortController()

  constructor ({ closeMappings }: KeptTensorsOptions = {}) {
    this.#closeMappings = closeMappings
  }

  /** How many names are kept, and the bytes of their tensors. */
  get stats (): { names: number, bytes: number } {
    let names = 0
    let bytes = 0
    for (const { kept } of this.#slots.values()) {
      if (kept === undefined) continue
      names++
      bytes += kept.bytes
    }
    return { names, bytes }
  }

  /**
   * Writes a source and keeps it under a name. Tensors under that name are released first, before the write. If the
   * write fails, nothing is kept, unless `anyway`. Throws CONFLICT, and closes the source, if too many names are kept.
   */
  async keep<T> (
    { name, generation }: KeptName,
    source: TensorSource | TensorPatch,
    write: (source: WeightSource) => Promise<T>,
    anyway = false
  ): Promise<T> {
    if (this.#end.signal.aborted) {
      await source.close()
      throw new RefitError('ENGINE_CLOSED', 'the server is shutting down')
    }
    if (source.kind === 'patch') {
      await source.close()
      throw new RefitError(
        'UNSUPPORTED',
        'a delta cannot be kept: written once more, it would change what others have written meanwhile',
        { param: 'keep' }
      )
    }
    if (!this.#slots.has(name) && this.#slots.size >= MAX_NAMES) {
      await source.close()
      throw new RefitError(
        'CONFLICT',
        `${MAX_NAMES} names are kept already (${
          [...this.#slots.keys()].join(', ')
        }); give one back with /release_kept_tensors`,
        { param: 'keep' }
      )
    }
    return await this.#inTurn(name, async slot => {
      // Closed within the write's gate, or between two steps before it.
      const replaced = this.#giveBack(slot)
      const kept: Kept = {
        name,
        generation,
        source,
        mapping: `${++this.#serial}`,
        bytes: payloadBytes(source),
        isMapped: false
      }
      try {
        const outcome = await write(new KeptSource(kept, true))
        slot.kept = kept
        await replaced
        return outcome
      } catch (error) {
        slot.kept = kept
        if (!anyway) await this.#giveBack(slot, PATIENCE_MS)
        await Promise.race([replaced, sleep(PATIENCE_MS, undefined, { ref: false })])
        throw error
      }
    })
  }

  /**
   * Writes kept tensors again. `tensors`: other tensors in the same memory. Throws NOT_FOUND, CONFLICT for another
   * generation, and TENSOR_PAYLOAD if the sender has ended; then they are released.
   */
  async write<T> (
    { name, generation }: KeptName,
    write: (source: WeightSource) => Promise<T>,
    tensors?: TensorSource['tensors']
  ): Promise<T> {
    if (!this.#slots.has(name)) throw unknown(name)
    return await this.#inTurn(name, async slot => {
      const { kept } = slot
      if (kept === undefined) throw unknown(name)
      if (kept.generation !== generation) {
        throw new RefitError(
          'CONFLICT',
          `generation ${kept.generation} is kept under ${
            JSON.stringify(name)
          }, not ${generation}; send the handles of ${generation} with keep`,
          { param: 'kept' }
        )
      }
      try {
        await kept.source.look()
      } catch (error) {
        await this.#giveBack(slot, PATIENCE_MS)
        throw new RefitError(
          'TENSOR_PAYLOAD',
          `${errorMessage(error)}. What was kept under ${
            JSON.stringify(name)
          } is given back; send handles again, with keep`,
          { param: 'kept', cause: error }
        )
      }
      return await write(new KeptSource(kept, !kept.isMapped, tensors))
    })
  }

  /** Gives back the tensors of one name, or of all, after their running writes. Returns the names. */
  async release (name?: string, patienceMs?: number): Promise<KeptName[]> {
    const names = name === undefined ? [...this.#slots.keys()] : this.#slots.has(name) ? [name] : []
    const released = await Promise.all(names.map(async name =>
      await this.#inTurn(name, async slot => {
        const { kept } = slot
        await this.#giveBack(slot, patienceMs)
        return kept === undefined ? [] : [{ name, generation: kept.generation }]
      })
    ))
    return released.flat()
  }

  /**
   * Releases all, and keeps nothing more. Requests that wait for mappings to be closed stop waiting, because the writes
   * that delay them may end after this.
   */
  async close (): Promise<void> {
    this.#end.abort()
    await this.release(undefined, PATIENCE_MS)
  }

  /**
   * Closes the mappings, then releases the references. Never throws: memory that cannot be closed is not read again.
   */
  async #giveBack (slot: Slot, patienceMs?: number): Promise<void> {
    const { kept } = slot
    if (kept === undefined) return
    slot.kept = undefined
    if (kept.isMapped && kept.source.sources.some(source => 'segment' in source)) {
      await this.#patiently(this.#closeMappings?.(kept.mapping).catch(() => {}), patienceMs)
    }
    await kept.source.close()
  }

  async #patiently (closed: Promise<void> | undefined, patienceMs?: number): Promise<void> {
    const { signal } = this.#end
    const late = new AbortController()
    const wait = async (): Promise<void> => {
      if (patienceMs === undefined && !signal.aborted) await once(signal, 'abort', { signal: late.signal })
      await sleep(patienceMs ?? PATIENCE_MS, undefined, { signal: late.signal })
    }
    await Promise.race([closed, wait().catch(() => {})])
    late.abort()
  }

  async #inTurn<T> (name: string, run: (slot: Slot) => Promise<T>): Promise<T> {
    let slot = this.#slots.get(name)
    if (slot === undefined) this.#slots.set(name, slot = { kept: undefined, turn: Promise.resolve(), users: 0 })
    const own = slot
    own.users++
    const before = own.turn
    let leave: () => void = () => {}
    own.turn = new Promise(resolve => {
      leave = resolve
    })
    await before
    try {
      return await run(own)
    } finally {
      leave()
      if (--own.users === 0 && own.kept === undefined) this.#slots.delete(name)
    }
  }
}

/** A kept source during one write. */
class KeptSource implements StoredSource {
  readonly kind = 'stored'
  readonly transport = TENSOR
  readonly layout: 'checkpoint' | 'engine'
  readonly tensors: TensorSource['tensors']
  readonly sources: readonly NativeSource[]
  readonly #kept: Kept

  /** Events are waited for only the first time. Later the sender has waited itself, and its events may be gone. */
  constructor (kept: Kept, isFirst: boolean, tensors = kept.source.tensors) {
    const { source, mapping } = kept
    this.layout = source.layout
    this.tensors = tensors
    this.sources = source.sources.map(one =>
      'segment' in one
        ? { segment: { ...one.segment, keep: mapping, ...isFirst ? {} : { events: new Uint8Array() } } }
        : one
    )
    this.#kept = kept
  }

  async verify (): Promise<void> {
    await this.#kept.source.verify()
    this.#kept.isMapped = true
  }

  async close (): Promise<void> {
    this.#kept.source.rest()
  }
}

function unknown (name: string): RefitError {
  return new RefitError(
    'NOT_FOUND',
    `nothing is kept under ${
      JSON.stringify(name)
    }: it was released or replaced, or its write failed, or the server has started anew; send handles, with keep`,
    { param: 'kept' }
  )
}

function payloadBytes ({ tensors }: TensorSource): number {
  return tensors.reduce((sum, { shape, dtype }) => sum + shape.reduce((a, b) => a * b, bytesOf(dtype)), 0)
}
