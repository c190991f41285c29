import { randomUUID } from 'node:crypto'
import { setTimeout as sleep } from 'node:timers/promises'
import type { NativeSource } from '../../native/write-job.ts'
import type { StoredSource } from '../../contract/weight-source.ts'
import type { TensorDescriptor, TensorStorage } from '../../wire/torch/tensor.ts'
import { announceTensors } from '../announce-tensors.ts'
import { TENSOR } from './tensor.ts'
import type { OpenHandle } from './tensor-receiver.ts'

export interface SharedBuffersOptions {
  buffers: readonly OpenHandle[]
  /** For each rank the buffer that it reads. */
  bufferOf: readonly number[]
  /** Closes the mappings that writes keep open; engines without GPUs have none. */
  closeMappings?: ((mapping: string) => Promise<void>) | undefined
}

/** How long a reply may wait for mappings to be closed while another update writes. */
const PATIENCE_MS = 1000

/**
 * Memory that a sender overwrites repeatedly, to be written to the weights each time. It is opened once, mapped once
 * and released once.
 */
export class SharedBuffers {
  readonly #buffers: readonly OpenHandle[]
  readonly #bufferOf: readonly number[]
  readonly #closeMappings: SharedBuffersOptions['closeMappings']
  readonly #mapping = `buffers ${randomUUID()}`
  readonly #sourceOf = new Map<TensorStorage, number>()
  readonly #sources: NativeSource[] = []
  #isMapped = false
  #closing: Promise<void> | undefined

  constructor ({ buffers, bufferOf, closeMappings }: SharedBuffersOptions) {
    this.#buffers = buffers
    this.#bufferOf = bufferOf
    this.#closeMappings = closeMappings
    for (const { tensor, memory } of buffers) {
      if (memory !== null) this.#sourceOf.set(tensor.storage, this.#sources.push(memory) - 1)
    }
  }

  /**
   * A source of the buffers' present contents. `tensors` lists each buffer's. Ranks of one buffer have their tensors
   * announced once.
   */
  filled (tensors: readonly TensorDescriptor[][]): StoredSource {
    const buffers = this.#buffers
    // Events are waited for only the first time. Later the sender has waited itself, and its events may be gone.
    const isFirst = !this.#isMapped
    const open = (): void => {
      this.#isMapped = true
    }
    return {
      kind: 'stored',
      transport: TENSOR,
      tensors: announceTensors(this.#bufferOf.map(buffer => tensors[buffer]!), this.#sourceOf),
      sources: this.#sources.map(one =>
        'segment' in one
          ? { segment: { ...one.segment, keep: this.#mapping, ...isFirst ? {} : { events: new Uint8Array() } } }
          : one
      ),
      async verify () {
        for (const { source } of buffers) await source.verify()
        open()
      },
      async close () {
        for (const { source } of buffers) source.rest()
      }
    }
  }

  /** Closes the mappings, then releases the sender's references. Never throws. */
  async close (): Promise<void> {
    this.#closing ??= this.#close()
    await this.#closing
  }

  async #close (): Promise<void> {
    if (this.#isMapped && this.#sources.some(source => 'segment' in source)) {
      const late = new AbortController()
      await Promise.race([
        this.#closeMappings?.(this.#mapping).catch(() => {}),
        sleep(PATIENCE_MS, undefined, { signal: late.signal }).catch(() => {})
      ])
      late.abort()
    }
    await Promise.all(this.#buffers.map(async ({ source }) => {
      await source.close()
    }))
  }
}
