import t from 'tap'
import fc from 'fast-check'
import { Harness, makeRequest } from '../helpers/scheduler-harness.ts'

// Random programs on tiny page pools. In each of them every token and logprob equals the oracle's, which reads tokens
// and weights of every KV slot. Every request ends once, pages are consistent after every command, and nothing leaks.

const sampling = fc.record({
  maxNewTokens: fc.nat(14),
  minNewTokens: fc.oneof({ weight: 3, arbitrary: fc.constant(0) }, fc.nat(5)),
  seed: fc.bigInt({ min: 0n, max: 3n }),
  ignoreEos: fc.boolean(),
  stopTokenIds: fc.constantFrom<number[]>([], [3]),
  frequencyPenalty: fc.constantFrom(0, 0, 0.5),
  logitBias: fc.constantFrom<[number, number][]>([], [], [[2, 1.5]])
})

const add = fc.record({
  what: fc.constant('add' as const),
  family: fc.nat(2),
  length: fc.integer({ min: 1, max: 14 }),
  fork: fc.nat(15),
  copies: fc.constantFrom(1, 1, 1, 3),
  sampling,
  logprobs: fc.option(
    fc.record({
      startLen: fc.option(fc.nat(14)),
      top: fc.nat(2),
      ids: fc.constantFrom<number[]>([], [1]),
      raw: fc.boolean()
    }),
    { freq: 2 }
  ),
  salt: fc.constantFrom(undefined, undefined, 'x'),
  expertsFrom: fc.option(fc.nat(14), { nil: undefined })
})

const calm = [
  { weight: 6, arbitrary: add },
  // A request as one before: its output is guessed right if the weights are the same.
  { weight: 3, arbitrary: fc.record({ what: fc.constant('again' as const), n: fc.nat() }) },
  { weight: 8, arbitrary: fc.record({ what: fc.constant('step' as const), count: fc.integer({ min: 1, max: 6 }) }) },
  { weight: 1, arbitrary: fc.record({ what: fc.constant('abort' as const), n: fc.nat() }) },
  {
    weight: 2,
    arbitrary: fc.record({ what: fc.constant('shut' as const), abort: fc.constantFrom(false, false, true) })
  },
  { weight: 1, arbitrary: fc.record({ what: fc.constant('cancelShut' as const) }) },
  {
    weight: 3,
    arbitrary: fc.record({
      what: fc.constant('open' as const),
      moved: fc.constantFrom(true, true, false),
      flushCache: fc.boolean(),
      torn: fc.constantFrom(null, null, null, null, 'torn')
    })
  },
  { weight: 1, arbitrary: fc.record({ what: fc.constant('flush' as const) }) },
  { weight: 1, arbitrary: fc.record({ what: fc.constant('cancelFlush' as const) }) },
  { weight: 1, arbitrary: fc.record({ what: fc.constant('settle' as const) }) }
]
const wild = [
  ...calm,
  {
    weight: 2,
    arbitrary: fc.record({
      what: fc.constant('pause' as const),
      mode: fc.constantFrom('abort' as const, 'retract' as const, 'in_place' as const, 'in_place' as const)
    })
  },
  { weight: 2, arbitrary: fc.record({ what: fc.constant('resume' as const) }) },
  { weight: 1, arbitrary: fc.record({ what: fc.constant('fault' as const) }) }
]

type Command = typeof wild[number]['arbitrary'] extends fc.Arbitrary<infer C> ? C : never

interface Setup {
  pages: number
  maxRunning: number
  maxBatch: number
  overlap: boolean
  drafts?: number | undefined
}
const setup = fc.record({
  drafts: fc.option(fc.integer({ min: 1, max: 8 }), { nil: undefined }),
  overlap: fc.oneof({ weight: 3, arbitrary: fc.constant(true) }, fc.constant(false)),
  pages: fc.integer({ min: 8, max: 16 }),
  maxRunning: fc.integer({ min: 1, max: 6 }),
  maxBatch: fc.integer({ min: 1, max: 24 })
})

class Program {
  readonly h: Harness
  #calls = 0
  #weights = 0
  #shuts: number[] = []
  #flushes: number[] = []

  constructor ({ pages, maxRunning, maxBatch, overlap, drafts }: Setup) {
    this.h = new Harness({
      overlap,
      ...drafts === undefined ? {} : { drafts },
      pages,
      pageSize: 4,
      vocabSize: 9,
      contextLength: 30,
      maxRunningRequests: maxRunning,
      maxBatchTokens: maxBatch
    })
  }

  run (c: Command): void {
    const { h } = this
    switch (c.what) {
      case 'add': {
        const prompt = Array.from({ length: c.length }, (_, i) => (i * (c.family + 1) + (i >= c.fork ? 1 : 0)) % 9)
        const { startLen = null, ...rest } = c.logprobs ?? {}
        const logprobs = c.logprobs === null
          ? null
          : { ...rest, startLen: startLen === null ? null : Math.min(startLen, c.length) }
        const minNewTokens = Math.min(c.sampling.minNewTokens, c.sampling.maxNewTokens)
        for (let i = 0; i < c.copies; i++) {
          h.add(makeRequest(
            prompt,
            {
              ...c.sampling,
              minNewTokens,
              seed: c.sampling.seed + BigInt(i)
            },
            logprobs,
            c.salt,
            c.expertsFrom === undefined
              ? undefined
              : Math.min(c.expertsFrom, c.length)
          ))
        }
        break
      }
      case 'again': {
        const earlier = [...h.outcomes.values()]
        if (earlier.length > 0) h.add(earlier[c.n % earlier.length]!.request)
        break
      }
      case 'step':
        for (let i = 0; i < c.count && h.scheduler.busy; i++) {
          if (!h.scheduler.step()) throw new Error('busy, but nothing was computed')
          h.scheduler.check()
        }
        break
      case 'abort':
        this.abort(c.n)
        break
      case 'pause':
        h.scheduler.pause(c.mode)
        break
      case 'resume':
        h.scheduler.resume()
        break
      case 'shut':
        this.#shuts.push(++this.#calls)
        h.scheduler.shut(this.#calls, c.abort)
        break
      case 'cancelShut':
        if (this.#shuts.length > 0) h.scheduler.cancelShut(this.#shuts.at(-1)!)
        this.#shuts = this.#shuts.filter((call) => h.replies.get(call) !== false)
        break
      case 'open':
        this.open(c)
        break
      case 'flush':
        this.#flushes.push(++this.#calls)
        h.scheduler.flush(this.#calls)
        break
      case 'cancelFlush':
        if (this.#flushes.length > 0) h.scheduler.cancelFlush(this.#flushes.pop()!)
        break
      case 'settle':
        h.settle(++this.#calls)
        break
      case 'fault':
        h.device.fault = new Error('fault')
    }
    h.scheduler.check()
    // The main thread writes weights without a question when all requests have ended.
    if (h.device.underWay > 0 && [...h.outcomes.keys()].every(id => h.ended(id))) {
      throw new Error('all requests have ended, but a step is under way')
    }
  }

  /** Aborts a live request, or sometimes one that has ended. */
  abort (n: number): void {
    const { h } = this
    const live = [...h.outcomes.keys()].filter((id) => !h.ended(id))
    const ids = live.length > 0 && n % 8 !== 0 ? live : [...h.outcomes.keys()]
    if (ids.length === 0) return
    const id = ids[n % ids.length]!
    if (h.scheduler.abort(id) === h.ended(id) && live.includes(id)) return
    if (live.includes(id)) throw new Error('a live request was not aborted')
  }

  /** Opens the gate if it is shut. */
  open (c: { moved: boolean, flushCache: boolean, torn: string | null }): boolean {
    const call = this.#shuts[0]
    if (call === undefined || this.h.replies.get(call) !== true) return false
    this.#shuts.shift()
    if (c.moved) this.#weights++
    this.h.openWith(this.#weights, c)
    return true
  }

  /** Lets all requests end and checks the final state. */
  finish (): void {
    const { h } = this
    h.scheduler.resume()
    do h.drain()
    while (this.open({ moved: false, flushCache: false, torn: null }))
    for (const id of h.outcomes.keys()) {
      if (!h.ended(id)) throw new Error(`request ${id} never ended`)
      h.verify(id)
    }
    for (let call = 1; call <= this.#calls; call++) {
      if (!h.replies.has(call)) throw new Error(`call ${call} was never answered`)
    }
    const stats = h.scheduler.stats()
    if (stats.running + stats.queued > 0 || stats.usedTokens !== 0) {
      throw new Error(`left behind: ${JSON.stringify(stats)}`)
    }
    h.scheduler.flush(++this.#calls)
    if (h.scheduler.stats().cachedTokens !== 0) throw new Error('a flush of an idle engine leaves pages')
  }
}

t.test('in every random order of calls the tokens are right and nothing leaks', async t => {
  let drafted = 0
  let accepted = 0
  fc.assert(
    fc.property(setup, fc.array(fc.oneof(...wild), { maxLength: 60, size: 'max' }), (s, commands) => {
      const program = new Program(s)
      for (const command of commands) program.run(command)
      program.finish()
      const { draftTokens, acceptedTokens } = program.h.scheduler.stats()
      drafted += draftTokens
      accepted += acceptedTokens
    }),
    { numRuns: 1500 }
  )
  t.ok(accepted > 100, `${accepted} guesses were right`)
  t.ok(drafted - accepted > 100, `${drafted - accepted} guesses were wrong`)
})

t.test('without pauses, all tokens of a request are of one kind of weights', async () => {
  fc.assert(
    fc.property(setup, fc.array(fc.oneof(...calm), { maxLength: 60, size: 'max' }), (s, commands) => {
      const program = new Program(s)
      for (const command of commands) program.run(command as Command)
      program.finish()
      for (const { events } of program.h.outcomes.values()) {
        if (new Set(events.filter((e) => e.tokens.length > 0).map((e) => e.weightVersion)).size > 1) {
          throw new Error('tokens of two weights')
        }
      }
    }),
    { numRuns: 500 }
  )
})

t.test('neither retraction nor overlap nor drafts change a token', async t => {
  let retractions = 0
  let accepted = 0
  fc.assert(
    fc.property(fc.array(add, { minLength: 2, maxLength: 8 }), (adds) => {
      const run = (pages: number, overlap: boolean, drafts?: number): Harness => {
        const program = new Program({ pages, maxRunning: 8, maxBatch: 24, overlap, drafts })
        for (const command of adds) {
          program.run({
            ...command,
            sampling: { ...command.sampling, maxNewTokens: command.sampling.maxNewTokens * 2 }
          })
        }
        program.finish()
        return program.h
      }
      const runs = [run(8, true), run(512, true), run(512, true, 8), run(9, false, 3)]
      const alone = run(512, false)
      for (const { scheduler } of runs) {
        retractions += scheduler.stats().retractions
        accepted += scheduler.stats().acceptedTokens
      }
      for (const id of alone.outcomes.keys()) {
        const tokens = alone.tokens(id).join()
        if (runs.some(h => h.tokens(id).join() !== tokens)) throw new Error('tokens differ')
      }
    }),
    { numRuns: 300 }
  )
  t.ok(retractions > 0, 'retractions did happen')
  t.ok(accepted > 0, 'guesses were right')
})
