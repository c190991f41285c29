import { Readable } from 'node:stream'
import type { FastifyReply } from 'fastify'
import { STREAM_HIGH_WATER } from './limits.ts'
import { jsonParts } from './json-parts.ts'
import { hasTime, nextTurn } from './turns.ts'

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
  readonly #named: boolean
  readonly #onOpen: () => void
  #open = false
  #wanted = false
  #ended = false
  /** The rest of a frame that is being written. */
  #frame: Generator<string, void> | undefined
  /** Waits for its turn. */
  #pausing = false

  /** `named`: frames also have an `event` line with the type of the object, and there is no end mark. */
  constructor (next: () => unknown, onOpen: () => void, named = false) {
    super({ highWaterMark: STREAM_HIGH_WATER })
    this.#next = next
    this.#named = named
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
    if (this.#pausing) return
    while (this.#wanted && !this.destroyed) {
      if (!hasTime()) {
        this.#pausing = true
        void nextTurn().then(() => {
          this.#pausing = false
          this.#pump()
        })
        return
      }
      this.#frame ??= this.#nextFrame()
      const part = this.#frame?.next()
      if (part === undefined) {
        if (!this.#ended) return
        this.#wanted = false
        if (!this.#named) this.push('data: [DONE]\n\n')
        this.push(null)
      } else if (part.done === true) this.#frame = undefined
      else this.#wanted = this.push(part.value)
    }
  }

  /** The parts of the next frame; undefined if there is none. */
  #nextFrame (): Generator<string, void> | undefined {
    const event = this.#next()
    if (event === undefined) return undefined
    return frameParts(this.#named ? `event: ${(event as { type: string }).type}\n` : '', event)
  }
}

/** A frame that is short comes in one part. */
function* frameParts (name: string, event: unknown): Generator<string, void> {
  const parts = jsonParts(event)
  let text = `${name}data: ${parts.next().value as string}`
  for (const part of parts) {
    yield text
    text = part
  }
  yield `${text}\n\n`
}

export interface StreamedRun {
  /** Runs to the end, and calls `changed` whenever `next` may have a frame. */
  run: (changed: () => void) => Promise<void>
  next: () => unknown
  /** The frame that reports why a run broke off after its first byte. */
  failure: (error: unknown) => unknown
  /** See EventStream. */
  named?: boolean
}

/**
 * Replies with the events of a run. An error before the first event is thrown and becomes a status; a later one becomes
 * an event.
 */
export async function sendEvents (
  reply: FastifyReply,
  { run, next, failure, named }: StreamedRun
): Promise<FastifyReply> {
  let broken: unknown
  let failed = false
  const stream = new EventStream(
    () => {
      const event = next()
      if (event !== undefined || !failed) return event
      failed = false
      return failure(broken)
      // Without this a client waits for headers until the first token.
    },
    () => reply.raw.flushHeaders(),
    named
  )
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
