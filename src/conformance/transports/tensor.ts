import type { Tensor } from '../checkpoint.ts'
import type { HttpTarget, Reply } from '../http-target.ts'
import { versionField } from '../servers/sglang.ts'
import { bucketEntry, tensorEntry } from './pickle-writer.ts'
import type { BucketPiece, SharedTensor } from './pickle-writer.ts'
import { SharedMemory } from './shared-memory.ts'
import { ShmManager } from './shm-manager.ts'
import type { SendOptions, Transport } from './transport.ts'

export const TENSOR_ROUTE = '/update_weights_from_tensor'

/** A tensor in memory that this process has shared with every rank. */
export type Shared = SharedTensor & { memory: SharedMemory }

/** Pickled handles of tensors in shared memory of this host. */
export class TensorTransport implements Transport {
  readonly name = 'tensor'
  missing?: string
  readonly takesParts = true
  readonly #target: HttpTarget
  readonly #ranks: number
  #managers: ShmManager[] | undefined

  constructor (target: HttpTarget, ranks: number) {
    this.#target = target
    this.#ranks = ranks
  }

  async send (tensors: readonly Tensor[], options: SendOptions = {}): Promise<Reply> {
    return await this.withMemory(tensors, async shared => await this.post(shared, tensorEntry, null, options))
  }

  /** Runs with the tensors in shared memory, each with one reference for this process and one for each rank. */
  async withMemory<T> (tensors: readonly Tensor[], run: (shared: Shared[]) => Promise<T>): Promise<T> {
    const memories: SharedMemory[] = []
    try {
      const shared = tensors.map(({ name, dtype, shape, bytes }) => {
        const memory = new SharedMemory(bytes(), 1 + this.#ranks)
        memories.push(memory)
        return { name, dtype, shape, memory }
      })
      return await run(shared)
    } finally {
      for (const memory of memories) memory.close()
    }
  }

  /** Posts a pickle of the same tensors for each rank. Each rank has a manager, so that no two pickles are equal. */
  async post (
    shared: readonly SharedTensor[],
    entry: (shared: SharedTensor[]) => string,
    format: string | null,
    options: SendOptions = {}
  ): Promise<Reply> {
    this.#managers ??= await Promise.all(Array.from({ length: this.#ranks }, async () => await ShmManager.listen()))
    const entries = this.#managers.map(({ path }) => entry(shared.map(tensor => ({ ...tensor, manager: path }))))
    return await this.postEntries(entries, format, options)
  }

  /** Posts pickles, one for each rank or one for all. */
  async postEntries (
    entries: readonly string[],
    format: string | null,
    { label }: SendOptions = {}
  ): Promise<Reply> {
    return await this.#target.post(TENSOR_ROUTE, {
      serialized_named_tensors: Array.from({ length: this.#ranks }, (_, rank) => entries[rank] ?? entries[0]),
      load_format: format,
      ...versionField(label)
    })
  }

  async close (): Promise<void> {
    for (const manager of this.#managers ?? []) manager.close()
    this.#managers = undefined
  }
}

/** SGLang's flattened buckets: the same tensors as one tensor of bytes. */
export class BucketTransport implements Transport {
  readonly name = 'bucket'
  missing?: string
  readonly takesParts = true
  readonly #tensor: TensorTransport

  constructor (tensor: TensorTransport) {
    this.#tensor = tensor
  }

  async send (tensors: readonly Tensor[], options: SendOptions = {}): Promise<Reply> {
    return await this.sendPieces(tensors, pieces => pieces, options)
  }

  /** Sends a bucket whose list of places `change` may turn into lies. */
  async sendPieces (
    tensors: readonly Tensor[],
    change: (pieces: BucketPiece[]) => readonly BucketPiece[],
    options: SendOptions = {}
  ): Promise<Reply> {
    const data = tensors.map(({ bytes }) => bytes())
    let end = 0
    const pieces = tensors.map(({ name, dtype, shape }, i) => {
      const start = end
      end += data[i]!.length
      return { name, dtype, shape, start, end }
    })
    const flat: Tensor = { name: 'bucket', dtype: 'uint8', shape: [end], bytes: () => Buffer.concat(data) }
    const places = change(pieces)
    return await this.#tensor.withMemory([flat], async shared => {
      return await this.#tensor.post(shared, ([tensor]) => bucketEntry(tensor!, places), 'flattened_bucket', options)
    })
  }

  async close (): Promise<void> {}
}
