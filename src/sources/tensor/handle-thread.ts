import { closeSync } from 'node:fs'
import { Worker } from 'node:worker_threads'
import { RefitError } from '../../errors.ts'
import { native } from '../../native/load-addon.ts'
import { HandlePool } from './handle-pool.ts'
import type { Asked } from './handle-pool.ts'
import type { FromHandleThread, HandleThreadData, ToHandleThread } from './handle-messages.ts'
import { unpackReply } from './handle-reply.ts'
import type { PackedReply } from './handle-reply.ts'
import { VisibleGpus } from './visible-gpus.ts'

// The compiled file beside this one, or the source where TypeScript is run as it is.
const WORKER = new URL(`./handle-worker${import.meta.url.endsWith('.ts') ? '.ts' : '.js'}`, import.meta.url)
/** A decoder's many short-lived records are collected in one go, instead of being copied again and again. */
const YOUNG_MB = 192

/** Of all requests so far. When none is under way as much has been closed as opened. */
export interface HandleTotals {
  /** References of senders that were given back. */
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

/** A thread that ended, and took what it had open with it. Requests that waited behind the one at which it ended have not been looked at. */
export class ThreadEnded extends RefitError {
  readonly unseen: boolean
  constructor (error: RefitError, unseen: boolean) {
    super(error.code, error.message, { cause: error })
    this.unseen = unseen
  }
}

/** One life of the thread: what it opened is open as long as it lives. Without a worker: this thread, which does not end. */
export class ThreadLife {
  readonly worker: Worker | null
  readonly waiting = new Map<number, Waiting>()
  /** Descriptors that it took out of senders, by request. They are the process's, and Node does not know them. */
  readonly taken = new Map<number, number[]>()
  /** Files of shared memory that it has open. */
  files = 0
  ended = false

  constructor (worker: Worker | null) {
    this.worker = worker
  }
}

/**
 * The main thread's side of the thread of the shares, which is started by the first request or by `start`, and again after it has ended.
 * Small bodies are read right here: to hand them to a thread and back would take longer.
 */
export class HandleThread {
  readonly totals: HandleTotals = { handlesReleased: 0, filesOpened: 0, filesClosed: 0 }
  readonly #data: HandleThreadData
  readonly #near = new ThreadLife(null)
  #desk: HandlePool | undefined
  #life: ThreadLife | undefined
  #last = 0
  #closed = false

  constructor (data: HandleThreadData) {
    this.#data = data
  }

  /** Where small bodies are read. ENGINE_CLOSED after `close`. */
  near (): ThreadLife {
    this.#requireOpen()
    return this.#near
  }

  /** The thread that runs, or a new one. ENGINE_CLOSED after `close`. */
  start (): ThreadLife {
    this.#requireOpen()
    if (this.#life !== undefined) return this.#life
    const worker = new Worker(WORKER, {
      name: 'refit shares',
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
    // A process that waits for nothing of it may end.
    worker.unref()
    this.#life = life
    return life
  }

  /** Sends a request to that life of the thread. Throws ThreadEnded where it ends before the reply, and what it refused. */
  async ask (life: ThreadLife, request: Extract<Request, { type: 'announce' }>): Promise<Reply<'announced'>>
  async ask (
    life: ThreadLife,
    request: Extract<Request, { type: 'open' | 'unpickle' | 'handle' | 'offer' }>
  ): Promise<Reply<'opened'>>
  async ask (life: ThreadLife, request: Extract<Request, { type: 'look' }>): Promise<Reply<'looked'>>
  async ask (
    life: ThreadLife,
    request: Extract<Request, { type: 'release' | 'discard' | 'drop' }>
  ): Promise<Reply<'released'>>
  async ask (life: ThreadLife, request: Request): Promise<FromHandleThread> {
    if (life.ended) throw new ThreadEnded(new RefitError('INTERNAL', 'the thread that reads tensors has ended'), true)
    const message = { ...request, id: ++this.#last } as Asked
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

  /** Ends the thread; what is open still is given back. */
  async close (): Promise<void> {
    this.#closed = true
    this.#desk?.close()
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
    this.#desk ??= new HandlePool(native(), visible === null ? null : new VisibleGpus(visible))
    return this.#desk
  }

  #discard (life: ThreadLife, failure: RefitError): void {
    life.ended = true
    if (this.#life === life) this.#life = undefined
    for (const of of [...life.taken.keys()]) this.#closeTaken(life, of)
    // These went with it.
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

  /** Counts what was done; throws what was refused. */
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
        // What a refused request opened is closed again.
        totals.filesOpened += files + taken.length
        totals.filesClosed += files + taken.length
        throw new RefitError(code, text, param === undefined ? {} : { param })
      }
    }
    return message
  }
}

/** What goes to the thread without being copied. */
function memoryOf (message: Asked): ArrayBuffer[] {
  if (message.type !== 'announce') return []
  const memory = new Set<ArrayBuffer>()
  for (const entry of message.entries) {
    if (typeof entry !== 'string' && entry.byteLength === entry.buffer.byteLength) {
      memory.add(entry.buffer as ArrayBuffer)
    }
  }
  return [...memory]
}
