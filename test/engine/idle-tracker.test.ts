import t from 'tap'
import fc from 'fast-check'
import { IdleTracker } from '../../src/engine/idle-tracker.ts'
import type { ToWorker } from '../../src/engine/messages.ts'
import { Harness, makeRequest } from '../helpers/scheduler-harness.ts'

// Simulates two threads by hand: each side reads the other's messages later, in every order that two queues allow.

type Received = { id: number } | { call: number, done: boolean, holds: () => void }

class Threads {
  readonly tracker = new IdleTracker()
  readonly h = new Harness({
    pages: 16,
    pageSize: 4,
    vocabSize: 9,
    contextLength: 30,
    maxRunningRequests: 4,
    maxBatchTokens: 16
  })
  readonly toWorker: Array<() => void> = []
  readonly toMain: Received[] = []
  readonly #replied = new Set<number>()
  readonly #pauses = new Map<number, () => void>()
  readonly #live = new Set<number>()
  /** True from the message that shuts the gate without an answer until the message that opens it. */
  #mayRely = false
  #requested = 0
  #gate: { call: number, isShut: boolean } | null = null
  #calls = 0
  #requests = 0
  steps = 0
  relied = 0

  add (length: number): void {
    const id = this.#requests++
    this.tracker.sent(id)
    this.#live.add(id)
    this.toWorker.push(() => {
      this.h.add(
        makeRequest(Array.from({ length }, (_, i) => (i * 5 + id) % 9), { maxNewTokens: 1 + id % 5, ignoreEos: true })
      )
    })
  }

  /** Its reader leaves, and no caller waits for its events. */
  leave (n: number): void {
    const id = [...this.#live][n % Math.max(1, this.#live.size)]
    if (id === undefined) return
    this.#live.delete(id)
    this.toWorker.push(() => {
      this.h.scheduler.abort(id)
    })
  }

  pause (mode: Extract<ToWorker, { type: 'pause' }>['mode'] | 'drain'): void {
    const call = ++this.#calls
    this.#pauses.set(call, this.tracker.pausing())
    this.toWorker.push(() => {
      if (mode === 'drain') return this.h.scheduler.drain(call)
      this.h.scheduler.pause(mode)
      this.#reply(call, true)
    })
  }

  resume (): void {
    this.tracker.unsettled()
    this.toWorker.push(() => {
      this.h.scheduler.resume()
    })
  }

  shut (abort: boolean): void {
    if (this.#gate !== null) return
    const call = ++this.#calls
    const isShut = this.tracker.gateRequested(abort)
    this.#gate = { call, isShut }
    this.#mayRely = isShut
    if (isShut) this.relied++
    this.toWorker.push(() => {
      this.h.scheduler.shut(call, abort)
    })
  }

  open (asleep: boolean): void {
    if (this.#gate?.isShut !== true) return
    this.#gate = null
    this.#mayRely = false
    this.tracker.gateOpened(asleep)
    this.toWorker.push(() => {
      this.h.openWith(++this.#requested, { asleep: asleep ? 'asleep' : null })
    })
  }

  work (): void {
    this.toWorker.shift()?.()
    this.#tell()
  }

  /** Throws if a step runs while the main thread relies on an idle engine. */
  step (): void {
    if (!this.h.scheduler.busy) return
    if (this.#mayRely) throw new Error('a step runs while the gate counts as shut')
    this.h.scheduler.step()
    this.steps++
    this.#tell()
  }

  hear (): void {
    const received = this.toMain.shift()
    if (received === undefined) return
    if ('id' in received) {
      this.#live.delete(received.id)
      return this.tracker.ended(received.id)
    }
    if (received.done) received.holds()
    if (this.#gate?.call === received.call) this.#gate.isShut = true
  }

  #reply (call: number, done: boolean): void {
    this.toMain.push({ call, done, holds: this.#pauses.get(call) ?? (() => {}) })
  }

  #tell (): void {
    for (const id of this.h.outcomes.keys()) {
      if (!this.h.ended(id) || this.#replied.has(id)) continue
      this.#replied.add(id)
      this.toMain.push({ id })
    }
    for (const [call, done] of this.h.replies) this.#reply(call, done)
    this.h.replies.clear()
  }
}

const command = fc.oneof(
  {
    weight: 4,
    arbitrary: fc.integer({ min: 1, max: 9 }).map(length => (threads: Threads) => {
      threads.add(length)
    })
  },
  {
    weight: 1,
    arbitrary: fc.nat().map(n => (threads: Threads) => {
      threads.leave(n)
    })
  },
  {
    weight: 1,
    arbitrary: fc.constantFrom('abort' as const, 'retract' as const, 'in_place' as const, 'drain' as const).map(
      mode => (threads: Threads) => {
        threads.pause(mode)
      }
    )
  },
  {
    weight: 3,
    arbitrary: fc.constant((threads: Threads) => {
      threads.resume()
    })
  },
  {
    weight: 3,
    arbitrary: fc.constantFrom(false, false, true).map(abort => (threads: Threads) => {
      threads.shut(abort)
    })
  },
  {
    weight: 8,
    arbitrary: fc.constantFrom(false, false, false, false, false, true).map(asleep => (threads: Threads) => {
      threads.open(asleep)
    })
  },
  {
    weight: 9,
    arbitrary: fc.constant((threads: Threads) => {
      threads.work()
    })
  },
  {
    weight: 9,
    arbitrary: fc.constant((threads: Threads) => {
      threads.step()
    })
  },
  {
    weight: 9,
    arbitrary: fc.constant((threads: Threads) => {
      threads.hear()
    })
  }
)

t.test('no step runs between a shut without a reply and the opening of the gate', async t => {
  let relied = 0
  let steps = 0
  fc.assert(
    fc.property(fc.array(command, { minLength: 50, maxLength: 200, size: 'max' }), commands => {
      const threads = new Threads()
      for (const run of commands) run(threads)
      relied += threads.relied
      steps += threads.steps
    }),
    { numRuns: 600 }
  )
  t.ok(relied > 500 && steps > 2000, `${relied} gates, ${steps} steps`)
})

t.test('the tracker knows idle, paused and asleep; a request without a reader counts until it has ended', async t => {
  const tracker = new IdleTracker()
  t.equal(tracker.gateRequested(false), true, 'nothing was ever sent')
  t.equal(tracker.gateRequested(false), false, 'another gate is shut')
  tracker.gateGivenUp()
  tracker.gateOpened(false)
  tracker.sent(1)
  t.equal(tracker.gateRequested(false), false, 'a request may run')
  tracker.gateOpened(false)
  const holds = tracker.pausing()
  t.equal(tracker.gateRequested(false), false, 'the pause may not have been read')
  tracker.gateGivenUp()
  holds()
  t.equal(tracker.gateRequested(true), false, 'its end is wanted')
  tracker.gateGivenUp()
  t.equal(tracker.gateRequested(false), true)
  tracker.gateOpened(false)
  const late = tracker.pausing()
  tracker.unsettled()
  late()
  t.equal(tracker.gateRequested(false), false, 'a resume was sent after the pause')
  tracker.gateOpened(true)
  t.equal(tracker.gateRequested(false), true, 'asleep')
  tracker.gateOpened(false)
  tracker.ended(1)
  t.equal(tracker.gateRequested(false), true)
})
