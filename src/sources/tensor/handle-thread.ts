import { closeSync } from 'node:fs'
import { Worker } from 'node:worker_threads'
import { RefitError } from '../../errors.ts'
import { native } from '../../native/load-addon.ts'
import { HandlePool } from './handle-pool.ts'
import type { PoolRequest } from './handle-pool.ts'
import type { FromHandleThread, HandleThreadData, ToHandleThread } from './handle-messages.ts'
import { unpackReply } from './handle-reply.ts'
import type { PackedReply } from './handle-reply.ts'
import { VisibleGpus } from './visible-gpus.ts'

// The compiled file beside this one, or the source if TypeScript runs directly.
const WORKER = new URL(`./handle-worker${import.meta.url.endsWith('.ts') ? '.ts' : '.js'}`, import.meta.url)
/**
 * A decoder makes many short-lived records. A large young generation collects them at once instead of copying them
 * repeatedly.
 */
const YOUNG_MB = 192

/** Totals of all requests. While none is running, as many files have been closed as opened. */
export interface HandleTotals {
  /** References that were released. */
  handlesReleased: number
  /** Files of shared memory, and descriptors of senders. */
  filesOpened: number
  filesClosed: number
}

type Reply<T extends FromHandleThread['type'] = FromHandleThread['type']> = Extract<FromHandleThread, { type: T }>
type Request = ToHandleThread extends infer T ? T extends { id: number } ? Omit<T, 'id'> : never : never
interface Waiting {
  resolve: (reply: FromHandleThread) => void
  reject: (error: Error) => void
}

/**
 * The thread has ended and closed its open files. `unseen`: the request waited behind the one that ended the thread,
 * and was not read.
 */
export class ThreadEnded extends RefitError {
  readonly unseen: boolean
  constructor (error: RefitError, unseen: boolean) {
    super(error.code, error.message, { cause: error })
    this.unseen = unseen
  }
}

/**
 * One run of the thread: files that it opens stay open until it ends. Without a worker it represents the main thread,
 * which does not end.
 */
export class ThreadLife {
  readonly worker: Worker | null
  readonly waiting = new Map<number, Waiting>()
  /** Descriptors that it took out of senders, by request. They belong to the process, and Node does not know them. */
  readonly taken = new Map<number, number[]>()
  /** Files of shared memory that it has open. */
  files = 0
  ended = false

  constructor (worker: Worker | null) {
    this.worker = worker
  }
}

/**
 * The main thread's side of the handle thread. The first request or `start` starts the thread, also after it has ended.
 * Small bodies are read on this thread, because handing them over would take longer.
 */
export class HandleThread {
  readonly totals: HandleTotals = { handlesReleased: 0, filesOpened: 0, filesClosed: 0 }
  readonly #data: HandleThreadData
  readonly #near = new ThreadLife(null)
  #pool: HandlePool | undefined
  #life: ThreadLife | undefined
  #last = 0
  #closed = false

  constructor (data: HandleThreadData) {
    this.#data = data
  }

  /** The life in which small bodies are read. ENGINE_CLOSED after `close`. */
  near (): ThreadLife {
    this.#requireOpen()
    return this.#near
  }

  /** The running thread, or a new one. ENGINE_CLOSED after `close`. */
  start (): ThreadLife {
    this.#requireOpen()
    if (this.#life !== undefined) return this.#life
    const worker = new Worker(WORKER, {
      name: 'refit handles',
      workerData: this.#data,
      resourceLimits: { maxYoungGenerationSizeMb: YOUNG_MB }
    })
    const life = new ThreadLife(worker)
    let failure = new RefitError('INTERNAL', 'the thread that reads tensors has ended')
    worker.on('message', (message: PackedReply) => {
      this.#receive(life, unpackReply(message))
    })
    worker.on('error', (error: NodeJS.ErrnoException) => {
      failure = error.code === 'ERR_WORKER_OUT_OF_MEMORY'
        ? new RefitError(
          'PICKLE_LIMIT',
          'reading the payload takes more memory than there is for it; send fewer tensors in one request'
        )
        : new RefitError('INTERNAL', `the thread that reads tensors failed: ${error.message}`, { cause: error })
    })
    worker.once('exit', () => {
      this.#discard(life, failure)
    })
    // A process that waits for none of its replies may exit.
    worker.unref()
    this.#life = life
    return life
  }

  /**
   * Sends a request to one life of the thread. Throws ThreadEnded if the thread ends before its reply, and the error of
   * a refused request.
   */
  async request (life: ThreadLife, request: Extract<Request, { type: 'announce' }>): Promise<Reply<'announced'>>
  async request (
    life: ThreadLife,
    request: Extract<Request, { type: 'open' | 'unpickle' | 'handle' | 'offer' }>
  ): Promise<Reply<'opened'>>
  async request (life: ThreadLife, request: Extract<Request, { type: 'look' }>): Promise<Reply<'looked'>>
  async request (
    life: ThreadLife,
    request: Extract<Request, { type: 'release' | 'discard' | 'drop' }>
  ): Promise<Reply<'released'>>
  async request (life: ThreadLife, request: Request): Promise<FromHandleThread> {
    if (life.ended) throw new ThreadEnded(new RefitError('INTERNAL', 'the thread that reads tensors has ended'), true)
    const message = { ...request, id: ++this.#last } as PoolRequest
    const { worker } = life
    const reply = worker === null
      ? this.#settle(life, this.#requirePool().handle(message))
      : await new Promise<FromHandleThread>((resolve, reject) => {
        life.waiting.set(message.id, { resolve, reject })
        worker.ref()
        worker.postMessage(message, memoryOf(message))
      })
    if (request.type === 'release') this.#closeTaken(life, request.of)
    return reply
  }

  /** Ends the thread, and releases all open handles. */
  async close (): Promise<void> {
    this.#closed = true
    this.#pool?.close()
    this.#discard(this.#near, new RefitError('ENGINE_CLOSED', 'the server is shutting down'))
    const worker = this.#life?.worker
    if (worker == null) return
    const ended = new Promise(resolve => worker.once('exit', resolve))
    worker.ref()
    worker.postMessage({ type: 'end' } satisfies ToHandleThread)
    await ended
  }

  #requireOpen (): void {
    if (this.#closed) throw new RefitError('ENGINE_CLOSED', 'the server is shutting down')
  }

  #requirePool (): HandlePool {
    const { visible } = this.#data
    this.#pool ??= new HandlePool(native(), visible === null ? null : new VisibleGpus(visible))
    return this.#pool
  }

  #discard (life: ThreadLife, failure: RefitError): void {
    life.ended = true
    if (this.#life === life) this.#life = undefined
    for (const of of [...life.taken.keys()]) this.#closeTaken(life, of)
    // The files were closed with the thread.
    this.totals.filesClosed += life.files
    life.files = 0
    let unseen = false
    for (const { reject } of life.waiting.values()) {
      reject(new ThreadEnded(failure, unseen))
      unseen = true
    }
    life.waiting.clear()
  }

  #closeTaken (life: ThreadLife, of: number): void {
    const taken = life.taken.get(of) ?? []
    life.taken.delete(of)
    for (const fd of taken) closeSync(fd)
    this.totals.filesClosed += taken.length
  }

  #receive (life: ThreadLife, message: FromHandleThread): void {
    const waiting = life.waiting.get(message.id)
    life.waiting.delete(message.id)
    if (life.waiting.size === 0 && !this.#closed) life.worker?.unref()
    try {
      this.#settle(life, message)
      waiting?.resolve(message)
    } catch (error) {
      waiting?.reject(error as Error)
    }
  }

  /** Updates the totals; throws the error of a refused request. */
  #settle (life: ThreadLife, message: FromHandleThread): FromHandleThread {
    const { totals } = this
    switch (message.type) {
      case 'announced':
      case 'opened':
        totals.filesOpened += message.fds.length + message.taken.length
        life.files += message.fds.length
        if (message.taken.length > 0) life.taken.set(message.id, message.taken)
        break
      case 'released':
        totals.handlesReleased += message.released.handles
        totals.filesClosed += message.released.files
        life.files -= message.released.files
        break
      case 'refused': {
        const { released: { handles, files }, taken, code, message: text, param } = message
        for (const fd of taken) closeSync(fd)
        totals.handlesReleased += handles
        // Files that a refused request opened are closed again.
        totals.filesOpened += files + taken.length
        totals.filesClosed += files + taken.length
        throw new RefitError(code, text, param === undefined ? {} : { param })
      }
    }
    return message
  }
}

/** Memory that is transferred to the thread instead of copied. */
function memoryOf (message: PoolRequest): ArrayBuffer[] {
  if (message.type !== 'announce') return []
  const memory = new Set<ArrayBuffer>()
  for (const entry of message.entries) {
    if (typeof entry !== 'string' && entry.byteLength === entry.buffer.byteLength) {
      memory.add(entry.buffer as ArrayBuffer)
    }
  }
  return [...memory]
}
