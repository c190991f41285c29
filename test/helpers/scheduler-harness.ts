import { Scheduler } from '../../src/engine/scheduling/scheduler.ts'
import type { SchedulerOptions } from '../../src/engine/step-device.ts'
import type { GenerateRequest, LogprobOptions, SamplingParams, TokenEvent } from '../../src/contract/rollout-engine.ts'
import { FakeDevice, RECORDED, SCORE_ROW, expertsOf, logprobOf, nextToken } from './fake-device.ts'
import type { Context } from './fake-device.ts'
import { PLAIN_SAMPLING } from '../../src/http/generation/plain-sampling.ts'

export const SAMPLING: SamplingParams = {
  maxNewTokens: 8,
  ...PLAIN_SAMPLING,
  temperature: 1,
  ignoreEos: false,
  seed: 7n
}

export function makeRequest (
  inputIds: number[],
  sampling: Partial<SamplingParams> = {},
  logprobs: Partial<LogprobOptions> | null = null,
  cacheSalt?: string,
  expertsFrom?: number
): GenerateRequest {
  return {
    rid: 'r',
    inputIds: Int32Array.from(inputIds),
    sampling: { ...SAMPLING, ...sampling },
    logprobs: logprobs === null ? null : { startLen: null, top: 0, ids: [], raw: false, ...logprobs },
    ...(cacheSalt === undefined ? {} : { cacheSalt }),
    ...(expertsFrom === undefined ? {} : { expertsFrom })
  }
}

/** Everything that arrived for one request. */
export interface Outcome {
  request: GenerateRequest
  events: TokenEvent[]
  error: { code: string, message: string } | null
}

export type HarnessOptions = Partial<
  Pick<
    SchedulerOptions,
    | 'pages'
    | 'pageSize'
    | 'contextLength'
    | 'vocabSize'
    | 'eosTokenIds'
    | 'maxRunningRequests'
    | 'maxQueuedRequests'
    | 'maxBatchTokens'
    | 'recorded'
    | 'grammars'
    | 'torn'
    | 'now'
    | 'overlap'
    | 'drafts'
  >
>

/**
 * A scheduler on a fake device. All its output is collected by request and call. Weight labels are the numbers of the
 * weights.
 */
/** Weights that no step may use. */
const SPOILT = 999_999

export class Harness {
  readonly device: FakeDevice
  readonly scheduler: Scheduler
  readonly outcomes = new Map<number, Outcome>()
  readonly replies = new Map<number, boolean>()
  readonly options: SchedulerOptions
  #clock = 0
  #ids = 0
  /** The set that requests start with. */
  #live = 0
  /** The set that is spoilt when a call is answered. */
  readonly #awaited = new Map<number, number>()
  /** Number of steps that must have ended when a settle is answered. */
  readonly #settles = new Map<number, number>()

  constructor (options: HarnessOptions = {}) {
    const pages = options.pages ?? 64
    const pageSize = options.pageSize ?? 4
    const vocabSize = options.vocabSize ?? 100
    this.device = new FakeDevice(pages, pageSize, vocabSize)
    this.options = {
      device: this.device,
      sink: {
        event: (id, event) => {
          const outcome = this.outcomes.get(id)!
          if (this.ended(id)) throw new Error(`request ${id} got an event after its end`)
          outcome.events.push(event)
        },
        error: (id, code, message) => {
          if (this.ended(id)) throw new Error(`request ${id} got an error after its end`)
          this.outcomes.get(id)!.error = { code, message }
        },
        reply: (call, done) => {
          if (this.replies.has(call)) throw new Error(`call ${call} got two replies`)
          const old = this.#awaited.get(call)
          const steps = this.#settles.get(call)
          if (steps !== undefined && this.device.steps < steps) throw new Error('a settle is answered too early')
          // Steps of other weights may be under way then: the device computes with what a set holds when they end.
          if (old !== undefined) this.device.sets![old] = SPOILT
          else if (done && steps === undefined && this.device.underWay > 0) {
            throw new Error(`call ${call} is answered while a step is under way`)
          }
          this.replies.set(call, done)
        }
      },
      pages,
      pageSize,
      vocabSize,
      contextLength: 256,
      eosTokenIds: [0],
      maxRunningRequests: 8,
      maxQueuedRequests: 1000,
      maxBatchTokens: 32,
      overlap: true,
      epoch: 0,
      version: '0',
      torn: null,
      now: () => this.#clock++,
      drawSeed: () => 0x1234567890abcdefn,
      recorded: RECORDED,
      ...options
    }
    this.scheduler = new Scheduler(this.options)
  }

  add (request: GenerateRequest): number {
    const id = this.#ids++
    this.outcomes.set(id, { request, events: [], error: null })
    this.scheduler.add(id, request)
    return id
  }

  ended (id: number): boolean {
    const { events, error } = this.outcomes.get(id)!
    return error !== null || (events.at(-1)?.finish ?? null) !== null
  }

  /** Steps until nothing is left to do, checking pages and lists after each. */
  drain (limit = 20000): void {
    for (let i = 0; this.scheduler.busy; i++) {
      if (i === limit) throw new Error(`still busy after ${limit} steps`)
      if (!this.scheduler.step()) throw new Error('busy, but nothing was computed')
      this.scheduler.check()
    }
    if (this.device.underWay > 0) throw new Error('idle, but a step is under way')
  }

  /** Opens a gate that is shut, with other weights. */
  openWith (
    weights: number,
    options: { flushCache?: boolean, torn?: string | null, asleep?: string | null } = {}
  ): void {
    const { sets } = this.device
    const set = this.#live
    if (sets !== null) sets[set] = weights
    this.device.weights = weights
    this.scheduler.open({
      set,
      epoch: weights,
      version: String(weights),
      flushCache: options.flushCache ?? true,
      torn: options.torn ?? null,
      asleep: options.asleep ?? null
    })
  }

  /** Writes other weights into the set that no step uses, puts it in use, and spoils the set that was in use. */
  swapTo (weights: number, options: { flushCache?: boolean, abort?: boolean, keepOld?: boolean } = {}): void {
    const sets = this.device.sets ??= [this.device.weights, SPOILT]
    const set = 1 - this.#live
    if (sets[set] !== SPOILT) throw new Error('requests use the set that is written')
    sets[set] = weights
    this.#live = set
    this.scheduler.swap({
      set,
      epoch: weights,
      version: String(weights),
      flushCache: options.flushCache ?? true,
      torn: null,
      asleep: null
    }, { abort: options.abort ?? false, keepOld: options.keepOld ?? false })
    if (options.keepOld !== true) sets[1 - set] = SPOILT
  }

  /** The same, but requests that have started finish on the weights in use; they are spoilt when `call` is answered. */
  swapKeepingOld (weights: number, call: number): void {
    this.swapTo(weights, { keepOld: true })
    this.#awaited.set(call, 1 - this.#live)
    this.scheduler.awaitOld(call)
  }

  /** The call is answered when the steps have ended that are under way now. */
  settle (call: number): void {
    this.#settles.set(call, this.device.steps + this.device.underWay)
    this.scheduler.settle(call)
  }

  tokens (id: number): number[] {
    return this.outcomes.get(id)!.events.flatMap((event) => event.tokens)
  }

  /**
   * Throws unless everything that arrived for a request matches the fake device's function. The events show which
   * weights computed each token's KV: a first prefill, or one after a retraction, uses only the weights of its event.
   */
  verify (id: number): void {
    const { request, events } = this.outcomes.get(id)!
    const { sampling: s, logprobs, inputIds } = request
    const fail = (what: string): never => {
      throw new Error(`request ${id}: ${what}`)
    }
    const tokens = [...inputIds]
    const weights: number[] = inputIds.length === 0 ? [] : new Array<number>(inputIds.length).fill(-1)
    const stops = [...(s.ignoreEos ? [] : this.options.eosTokenIds), ...s.stopTokenIds]
    const maxLength = Math.min(inputIds.length + s.maxNewTokens, this.options.contextLength)
    let retractions = 0
    let first = true
    for (const event of events) {
      const version = Number(event.weightVersion)
      if (event.tokens.length > 1) fail('more than one token in a step')
      // A prompt is computed even if neither its tokens nor its scores are requested.
      if (event.tokens.length === 1 || event.input !== null || event.finish?.type === 'length') {
        if (first || event.retractions > retractions) weights.fill(version)
        else weights[weights.length - 1] = version
        if (event.input !== null) this.#verifyInput(request, event, { tokens, weights, current: version })
        else if (first && logprobs !== null && logprobs.startLen !== null) fail('input logprobs are missing')
        retractions = event.retractions
        first = false
      }
      const done = tokens.length - inputIds.length
      if (event.tokens.length === 1) {
        const context: Context = { tokens, weights, current: version }
        const penalties = s.frequencyPenalty !== 0 || s.presencePenalty !== 0 || s.repetitionPenalty !== 1
        const flags = logprobs === null ? 0 : logprobs.raw ? 3 : 1
        const token = nextToken(context, {
          topK: s.topK,
          flags,
          floats: Float32Array.of(
            s.temperature,
            s.topP,
            s.minP,
            s.frequencyPenalty,
            s.presencePenalty,
            s.repetitionPenalty
          ),
          seed: event.seed,
          historyPrompt: penalties ? inputIds.length : 0,
          history: penalties ? tokens : [],
          bias: [
            ...s.logitBias,
            ...(done < s.minNewTokens ? stops.map((id): [number, number] => [id, -Infinity]) : [])
          ],
          mask: null
        }, this.options.vocabSize)
        if (token !== event.tokens[0]) fail(`token ${done} is ${event.tokens[0]}, expected ${token}`)
        if (logprobs !== null) {
          equal(event.logprobs, [[logprobOf(context, flags, token), token]], 'logprobs')
          equal(event.top, [Array.from({ length: logprobs.top }, (_, i) => [logprobOf(context, flags, i), i])], 'top')
          equal(event.ids, [logprobs.ids.map((i) => [logprobOf(context, flags, i), i])], 'ids')
        }
        tokens.push(token)
        weights.push(-1)
        const expected = stops.includes(token) && done + 1 > s.minNewTokens
          ? { type: 'stop', matched: token }
          : tokens.length >= maxLength
          ? { type: 'length', length: done + 1 }
          : null
        if (event.finish?.type !== 'abort') equal(event.finish, expected, 'finish')
      }
      if (event.completionTokens !== tokens.length - inputIds.length) fail('completionTokens is wrong')
      if (event.promptTokens !== inputIds.length) fail('promptTokens is wrong')
      if (event.cachedTokens % this.options.pageSize !== 0 || event.cachedTokens >= inputIds.length) {
        fail(`cachedTokens is ${event.cachedTokens}`)
      }
      if (s.seed !== null && event.seed !== s.seed) fail('seed is wrong')
      // A request that ended before its first token (or score) has computed nothing.
      const { expertsFrom: from } = request
      const wanted = event.finish === null || from === undefined || first
        ? undefined
        : tokens.slice(0, -1).flatMap((token, i) => i < from ? [] : expertsOf(token, i, weights[i]!))
      equal(event.experts === undefined ? undefined : Array.from(event.experts), wanted, 'experts')
    }

    function equal (got: unknown, expected: unknown, what: string): void {
      if (JSON.stringify(got) !== JSON.stringify(expected)) {
        fail(`${what}: got ${JSON.stringify(got)}, expected ${JSON.stringify(expected)}`)
      }
    }
  }

  #verifyInput (request: GenerateRequest, event: TokenEvent, whole: Context): void {
    const { inputIds, logprobs } = request
    const { startLen, top, ids } = logprobs!
    const expected: unknown[][] = [[], [], []]
    for (let p = startLen!; p < inputIds.length; p++) {
      const context = {
        tokens: Array.from(inputIds.subarray(0, p)),
        weights: Array.from(whole.weights).slice(0, p),
        current: whole.current
      }
      const score = (id: number): number => logprobOf(context, SCORE_ROW.flags, id)
      expected[0]!.push(p === 0 ? [null, inputIds[0]] : [score(inputIds[p]!), inputIds[p]])
      expected[1]!.push(p === 0 ? null : Array.from({ length: top }, (_, i) => [score(i), i]))
      expected[2]!.push(p === 0 ? null : ids.map((i) => [score(i), i]))
    }
    const got = [event.input!.logprobs, event.input!.top, event.input!.ids]
    if (JSON.stringify(got) !== JSON.stringify(expected)) {
      throw new Error(`input logprobs: got ${JSON.stringify(got)}, expected ${JSON.stringify(expected)}`)
    }
  }
}
