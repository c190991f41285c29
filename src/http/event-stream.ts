import { Readable } from 'node:stream'
import type { FastifyReply } from 'fastify'
import { STREAM_HIGH_WATER } from './limits.ts'

/**
 * How long a stream's status waits for the first event, so that a request refused by the engine gets an error status.
 */
const FIRST_EVENT_MS = 250

/**
 * Server-sent events, made when the reader has room for them: `next` returns the object of the next frame, or undefined
 * if there is none. A slow reader gets fewer, larger events; nothing piles up, and generation does not wait.
 */
export class EventStream extends Readable {
  readonly #next: () => unknown
  readonly #onOpen: () => void
  #open = false
  #wanted = false
  #ended = false

  constructor (next: () => unknown, onOpen: () => void) {
    super({ highWaterMark: STREAM_HIGH_WATER })
    this.#next = next
    this.#onOpen = onOpen
  }

  /** There may be a new frame. */
  notify (): void {
    if (this.#wanted) this.#pump()
  }

  /** Ends the stream after the remaining frames: `last`, if given, then the end mark. */
  finish (): void {
    this.#ended = true
    this.notify()
  }

  override _read (): void {
    if (!this.#open) {
      this.#open = true
      this.#onOpen()
    }
    this.#wanted = true
    this.#pump()
  }

  #pump (): void {
    while (this.#wanted && !this.destroyed) {
      const event = this.#next()
      if (event !== undefined) {
        this.#wanted = this.push(`data: ${JSON.stringify(event)}\n\n`)
      } else if (this.#ended) {
        this.#wanted = false
        this.push('data: [DONE]\n\n')
        this.push(null)
      } else return
    }
  }
}

export interface StreamedRun {
  /** Runs to the end, and calls `changed` whenever `next` may have a frame. */
  run: (changed: () => void) => Promise<void>
  next: () => unknown
  /** The frame that reports why a run broke off after its first byte. */
  failure: (error: unknown) => unknown
}

/**
 * Replies with the events of a run. An error before the first event is thrown and becomes a status; a later one becomes
 * an event.
 */
export async function sendEvents (reply: FastifyReply, { run, next, failure }: StreamedRun): Promise<FastifyReply> {
  let broken: unknown
  let failed = false
  const stream = new EventStream(() => {
    const event = next()
    if (event !== undefined || !failed) return event
    failed = false
    return failure(broken)
    // Without this a client waits for headers until the first token.
  }, () => reply.raw.flushHeaders())
  let begun = (): void => {}
  const first = new Promise<void>(resolve => {
    begun = resolve
  })
  const done = run(() => {
    begun()
    stream.notify()
  })
  let timer: NodeJS.Timeout | undefined
  const patience = new Promise<void>(resolve => {
    timer = setTimeout(resolve, FIRST_EVENT_MS)
  })
  try {
    await Promise.race([first, done, patience])
  } finally {
    clearTimeout(timer)
  }
  done.then(() => stream.finish(), error => {
    failed = true
    broken = error
    reply.request.log.info({ err: error }, 'a stream broke off')
    stream.finish()
  })
  // The client has disconnected already.
  if (reply.raw.destroyed) return reply.hijack()
  reply.header('content-type', 'text/event-stream; charset=utf-8').header('cache-control', 'no-cache').header(
    'x-accel-buffering',
    'no'
  )
  return await reply.send(stream)
}
