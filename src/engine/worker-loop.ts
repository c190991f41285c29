import { receiveMessageOnPort } from 'node:worker_threads'
import type { MessagePort } from 'node:worker_threads'
import { EventPacker } from './event-packer.ts'
import type { Heartbeat } from './heartbeat.ts'
import { loadOf } from './messages.ts'
import type { FromWorker, ToWorker } from './messages.ts'
import { LostDevice } from './lost-device.ts'
import { Scheduler } from './scheduling/scheduler.ts'
import type { SchedulerOptions } from './step-device.ts'

/** Longest time of steps without a turn of the event loop. Finalizers free memory in such a turn. */
const TURN_MS = 20
/**
 * Load of events that wait for the main thread (loadOf) from which on no step begins: it reads all waiting messages at
 * once, and answers nobody meanwhile.
 */
const MOST_UNDELIVERED = 16 * 1024

/**
 * Drives a scheduler from a message port. While there is work it steps and polls the port in between; otherwise, or
 * while the gate is shut, it sleeps in the event loop until a message comes. It sends one message per step.
 */
export class WorkerLoop {
  readonly #port: MessagePort
  readonly #packer = new EventPacker()
  readonly #scheduler: Scheduler
  readonly #onClose: () => void
  /** Replies wait until earlier events have been sent. */
  #replies: FromWorker[] = []
  #scheduled = false
  #closed = false
  /** Load of the batches sent so far; it wraps around. */
  #sent = 0
  readonly #heartbeat: Heartbeat
  /** Something in the stats has changed since the last message. */
  #changed = false

  /** `onClose` is called once, after the main thread has closed it and all requests have failed. */
  constructor (
    port: MessagePort,
    options: Omit<SchedulerOptions, 'heartbeat' | 'sink'> & { heartbeat: Heartbeat },
    onClose: () => void
  ) {
    this.#port = port
    this.#onClose = onClose
    this.#heartbeat = options.heartbeat
    this.#scheduler = new Scheduler({
      ...options,
      sink: {
        event: (id, event) => {
          this.#packer.event(id, event)
        },
        error: (id, code, message) => {
          this.#packer.error(id, code, message)
        },
        reply: (call, done) => {
          this.#replies.push({ type: 'reply', call, done })
        }
      }
    })
    port.on('message', (message: ToWorker) => {
      if (this.#closed) return
      this.#work(() => {
        this.#handle(message)
      })
      if (this.#scheduled) this.#send()
      else this.#turn()
    })
  }

  #turn (): void {
    this.#scheduled = false
    const until = performance.now() + TURN_MS
    while (!this.#closed) {
      for (let received; (received = receiveMessageOnPort(this.#port)) !== undefined && !this.#closed;) {
        const message = received.message as ToWorker
        this.#work(() => {
          this.#handle(message)
        })
      }
      if (this.#closed) return
      if (this.#heartbeat.undelivered(this.#sent) > MOST_UNDELIVERED) {
        this.#scheduled = true
        setTimeout(() => {
          this.#turn()
        }, 1)
        return
      }
      let worked = false
      this.#work(() => {
        worked = this.#scheduler.step()
      })
      if (worked) this.#changed = true
      this.#send()
      if (!worked) return
      if (performance.now() > until) {
        this.#scheduled = true
        setImmediate(() => {
          this.#turn()
        })
        return
      }
    }
  }

  /** Does something with the scheduler, which may find that the device is lost. */
  #work (work: () => void): void {
    try {
      work()
    } catch (error) {
      if (!(error instanceof LostDevice)) throw error
      this.#send()
      this.#post({ type: 'lost', message: error.message, ids: error.ids })
      // Messages that arrive from now on have no effect.
      this.#closed = true
    }
  }

  #handle (message: ToWorker): void {
    const scheduler = this.#scheduler
    this.#changed = true
    switch (message.type) {
      case 'add':
        return scheduler.add(message.id, message.request)
      case 'abort': {
        scheduler.abort(message.id)
        return
      }
      case 'abortAll':
        return scheduler.abortAll()
      case 'pause': {
        scheduler.pause(message.mode)
        this.#replies.push({ type: 'reply', call: message.call, done: true })
        return
      }
      case 'resume': {
        scheduler.resume()
        this.#replies.push({ type: 'reply', call: message.call, done: true })
        return
      }
      case 'drain':
        return scheduler.drain(message.call)
      case 'dropCache': {
        scheduler.dropCache(message.retract)
        this.#replies.push({ type: 'reply', call: message.call, done: true })
        return
      }
      case 'settle':
        return scheduler.settle(message.call)
      case 'flush':
        return scheduler.flush(message.call)
      case 'cancelFlush':
        return scheduler.cancelFlush(message.call)
      case 'shut':
        return scheduler.shut(message.call, message.abort, message.inPlace)
      case 'cancelShut':
        return scheduler.cancelShut(message.call)
      case 'open':
        return scheduler.open(message)
      case 'swap': {
        scheduler.swap(message, message)
        this.#replies.push({ type: 'reply', call: message.call, done: true })
        // The step under way has ended: its tokens do not wait for the next one, nor does the update.
        return this.#send()
      }
      case 'awaitOld':
        return scheduler.awaitOld(message.call)
      case 'endOld':
        return scheduler.endOld()
      case 'relabel':
        return scheduler.setVersion(message.version)
      case 'close': {
        scheduler.failAll('ENGINE_CLOSED', 'the engine is shutting down')
        this.#send()
        this.#closed = true
        this.#onClose()
      }
    }
  }

  #send (): void {
    if (this.#changed) {
      const batch = this.#packer.take(this.#scheduler.stats())
      this.#sent = (this.#sent + loadOf(batch)) | 0
      // These arrays take megabytes and this thread does not use them any more, so they are transferred, not copied.
      const moved = batch.details.flatMap(({ experts }) => experts === undefined ? [] : [experts.buffer as ArrayBuffer])
      this.#port.postMessage({ type: 'batch', ...batch } satisfies FromWorker, moved)
    }
    this.#changed = false
    for (const reply of this.#replies) this.#post(reply)
    this.#replies = []
  }

  #post (message: FromWorker): void {
    this.#port.postMessage(message)
  }
}
