import { Worker } from 'node:worker_threads'
import { RefitError } from '../errors.ts'
import type { TensorStorage } from '../wire/torch-tensor.ts'
import { unpackTensorBody } from '../wire/torch-packed.ts'
import type { WeightSource } from '../weights/source.ts'
import { announceTensors } from './announce-tensors.ts'
import type { FromShares, ToShares } from './share-messages.ts'
import { TensorSource } from './tensor.ts'

// The compiled file beside this one, or the source where TypeScript is run as it is.
const WORKER = new URL(`./share-worker${import.meta.url.endsWith('.ts') ? '.ts' : '.js'}`, import.meta.url)
/** A decoder's many short-lived records are collected in one go, instead of being copied again and again. */
const YOUNG_MB = 192

export interface TensorPayload {
  /** `serialized_named_tensors`. */
  entries: readonly string[]
  loadFormat: string | null
}

export interface TensorReceiverOptions {
  /** Tensor-parallel ranks. */
  ranks: number
  /** `info.device` of the engine: what kinds of memory it can read. */
  device: string
}

/** Of all requests so far. When none is under way as much has been closed as opened. */
export interface ReceiverCounts {
  /** References of senders that were given back. */
  sharesReleased: number
  filesOpened: number
  filesClosed: number
}

type Reply = Exclude<FromShares, { type: 'refused' }>
interface Waiting { resolve: (reply: Reply) => void, reject: (error: Error) => void }
type Request = ToShares extends infer T ? T extends { id: number } ? Omit<T, 'id'> : never : never

/** Opens what trainers share: the main thread's side of the thread of the shares, which is started by the first request or by `start`. */
export class TensorReceiver {
  readonly counts: ReceiverCounts = { sharesReleased: 0, filesOpened: 0, filesClosed: 0 }
  readonly #options: TensorReceiverOptions
  readonly #waiting = new Map<number, Waiting>()
  #worker: Worker | undefined
  #last = 0
  #closed = false

  constructor (options: TensorReceiverOptions) { this.#options = options }

  /** Starts the thread, so that the first request does not wait for it. */
  start (): void {
    if (!this.#closed) this.#running()
  }

  /**
   * Decodes and opens all of a payload. After a refusal nothing is open, and the sender's references have been given back:
   * INVALID_REQUEST, PICKLE_MALFORMED, PICKLE_REFUSED, PICKLE_LIMIT, TENSOR_PAYLOAD or UNSUPPORTED.
   */
  async open ({ entries, loadFormat }: TensorPayload): Promise<WeightSource> {
    const { ranks, device } = this.#options
    if (loadFormat === 'direct' && entries.length === 1 && ranks > 1) {
      await this.discard(entries)
      throw new RefitError('INVALID_REQUEST', `serialized_named_tensors has one entry; with load_format "direct" every tensor-parallel rank (${ranks}) is sent its own shards, in an entry of its own`, { param: 'serialized_named_tensors' })
    }
    const id = ++this.#last
    const worker = this.#running()
    const reply = await this.#ask(worker, id, { type: 'open', entries, loadFormat, ranks, device: device === 'cpu' ? 'cpu' : 'cuda' }) as Extract<Reply, { type: 'opened' }>
    this.counts.filesOpened += reply.fds.length
    const isOpen = (): boolean => this.#worker === worker
    const release = async (): Promise<void> => {
      // With its thread what it opened has been closed.
      if (isOpen()) await this.#ask(worker, id, { type: 'release' }).catch(() => {})
    }
    try {
      const body = unpackTensorBody(reply.body)
      const fileOf = new Map<TensorStorage, number>(body.storages.map((storage, index) => [storage, reply.fileOf[index]!]))
      return new TensorSource(announceTensors(body.ranks, fileOf), reply.fds, loadFormat === 'direct' ? 'engine' : 'checkpoint', isOpen, release)
    } catch (error) {
      await release()
      throw error
    }
  }

  /** Gives back the references of a body that is refused for other reasons. Never throws. */
  async discard (entries: readonly string[]): Promise<void> {
    await this.#ask(this.#running(), ++this.#last, { type: 'discard', entries }).catch(() => {})
  }

  /** Ends the thread; what is open still is given back. */
  async close (): Promise<void> {
    this.#closed = true
    const worker = this.#worker
    if (worker === undefined) return
    const ended = new Promise(resolve => worker.once('exit', resolve))
    worker.ref()
    worker.postMessage({ type: 'end' } satisfies ToShares)
    await ended
  }

  #running (): Worker {
    if (this.#closed) throw new RefitError('ENGINE_CLOSED', 'the server is shutting down')
    if (this.#worker !== undefined) return this.#worker
    const worker = new Worker(WORKER, { name: 'refit shares', resourceLimits: { maxYoungGenerationSizeMb: YOUNG_MB } })
    let failure: Error = new RefitError('INTERNAL', 'the thread that reads tensors has ended')
    worker.on('message', (message: FromShares) => { this.#receive(message) })
    worker.on('error', (error: NodeJS.ErrnoException) => {
      failure = error.code === 'ERR_WORKER_OUT_OF_MEMORY'
        ? new RefitError('PICKLE_LIMIT', 'reading the payload takes more memory than there is for it; send fewer tensors in one request')
        : new RefitError('INTERNAL', `the thread that reads tensors failed: ${error.message}`, { cause: error })
    })
    worker.once('exit', () => {
      if (this.#worker === worker) this.#worker = undefined
      // Its descriptors went with it.
      this.counts.filesClosed = this.counts.filesOpened
      for (const { reject } of this.#waiting.values()) reject(failure)
      this.#waiting.clear()
    })
    // A process that waits for nothing of it may end.
    worker.unref()
    this.#worker = worker
    return worker
  }

  async #ask (worker: Worker, id: number, request: Request): Promise<Reply> {
    return await new Promise((resolve, reject) => {
      this.#waiting.set(id, { resolve, reject })
      worker.ref()
      worker.postMessage({ ...request, id } as ToShares)
    })
  }

  #receive (message: FromShares): void {
    const waiting = this.#waiting.get(message.id)
    this.#waiting.delete(message.id)
    if (this.#waiting.size === 0 && !this.#closed) this.#worker?.unref()
    if (message.type !== 'opened') this.counts.sharesReleased += message.released.shares
    if (message.type === 'released') this.counts.filesClosed += message.released.files
    if (message.type !== 'refused') return waiting?.resolve(message)
    // What a refused request opened is closed again.
    this.counts.filesOpened += message.released.files
    this.counts.filesClosed += message.released.files
    const { code, message: text, param } = message
    waiting?.reject(new RefitError(code, text, param === undefined ? {} : { param }))
  }
}
