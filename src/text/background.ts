import { Worker } from 'node:worker_threads'
import { RefitError } from '../errors.ts'
import type { FromTextThread, TextJob, TextThreadData, ToTextThread } from './text-messages.ts'
import type { ChatMessage, ChatTemplateOptions, TextThread } from './tokenizer.ts'

// The compiled file beside this one, or the source if TypeScript runs directly.
const WORKER = new URL(`./text-worker${import.meta.url.endsWith('.ts') ? '.ts' : '.js'}`, import.meta.url)

/** A text that needs more memory than this ends its thread, not the process. */
const MEMORY_MB = 2048
/** From this length on, a text has the second thread: texts of usual prompts do not wait behind it for seconds. */
const HUGE = 1 << 18

/**
 * Reads long texts on threads of its own, one text after another on each: tokenizers take a second for a megabyte or
 * two. Idle threads do not keep the process alive.
 */
export class BackgroundText implements TextThread {
  readonly #long: Thread
  readonly #huge: Thread

  constructor ({ dir, templates, texts }: TextThreadData) {
    const data = { dir, templates, texts }
    this.#long = new Thread(data)
    this.#huge = new Thread(data)
  }

  async encode (text: string, { addSpecialTokens = true } = {}): Promise<Int32Array> {
    const reply = await this.#run({ type: 'encode', text, addSpecialTokens }, text.length)
    return (reply as { ids: Int32Array }).ids
  }

  async applyChatTemplate (messages: readonly ChatMessage[], options: ChatTemplateOptions = {}): Promise<string> {
    const job = { type: 'render', messages: JSON.stringify(messages), options: JSON.stringify(options) } as const
    return (await this.#run(job, job.messages.length + job.options.length) as { text: string }).text
  }

  async #run (job: TextJob, length: number): Promise<FromTextThread> {
    const reply = await (length < HUGE ? this.#long : this.#huge).run(job)
    if (!('error' in reply)) return reply
    const { code, error, param } = reply
    throw new RefitError(code, error, param === undefined ? {} : { param })
  }
}

interface Waiting {
  resolve: (reply: FromTextThread) => void
  reject: (error: RefitError) => void
}

/** The first job starts the worker, also after a job has ended it. */
class Thread {
  readonly #data: TextThreadData
  #worker: Worker | undefined
  #waiting = new Map<number, Waiting>()
  #last = 0

  constructor (data: TextThreadData) {
    this.#data = data
  }

  async run (job: TextJob): Promise<FromTextThread> {
    const worker = this.#worker ?? this.#start()
    const id = this.#last++
    return await new Promise<FromTextThread>((resolve, reject) => {
      this.#waiting.set(id, { resolve, reject })
      worker.ref()
      worker.postMessage({ id, ...job } satisfies ToTextThread)
    })
  }

  #start (): Worker {
    const worker = new Worker(WORKER, {
      name: 'refit text',
      workerData: this.#data,
      resourceLimits: { maxOldGenerationSizeMb: MEMORY_MB }
    })
    const waiting = new Map<number, Waiting>()
    let failure = new RefitError('INTERNAL', 'the thread that reads long texts has ended')
    worker.on('message', (reply: FromTextThread) => {
      waiting.get(reply.id)?.resolve(reply)
      waiting.delete(reply.id)
      if (waiting.size === 0) worker.unref()
    })
    worker.on('error', (error: NodeJS.ErrnoException) => {
      failure = error.code === 'ERR_WORKER_OUT_OF_MEMORY'
        ? new RefitError('INVALID_REQUEST', 'reading the text takes more memory than there is for it; send less text')
        : new RefitError('INTERNAL', `the thread that reads long texts failed: ${error.message}`, { cause: error })
    })
    worker.once('exit', () => {
      if (this.#worker === worker) this.#worker = undefined
      for (const { reject } of waiting.values()) reject(failure)
    })
    worker.unref()
    this.#worker = worker
    this.#waiting = waiting
    return worker
  }
}
