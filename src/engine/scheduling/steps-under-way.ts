import type { StepResult } from '../../native/step.ts'
import { isLost, LostDevice } from '../lost-device.ts'
import type { SchedulerOptions } from '../step-device.ts'
import { StepBuilder } from './step-builder.ts'
import type { StepWeights } from '../sequences/step-weights.ts'

/**
 * A step that has ended: its results, or the reason why it failed; how long the device took for it; and how long it was
 * since the end of the step before, or since its plan was begun if nothing was to be done then.
 */
export type EndedStep =
  & { step: StepBuilder, ms: number, interval: number }
  & ({ result: StepResult } | { error: unknown })

/**
 * The steps that the device has begun and whose results are not taken. There are at most two, and a step is planned
 * while at most one is under way.
 */
export class StepsUnderWay {
  readonly #begun: { step: StepBuilder, at: number }[] = []
  readonly #options: Pick<SchedulerOptions, 'device' | 'heartbeat' | 'now'>
  readonly #builders = [new StepBuilder(), new StepBuilder()] as const
  #steps = 0
  #endedAt = 0
  /** When the interval of the step that ends next began; null: nothing is to be done. */
  #from: number | null = null

  constructor (options: Pick<SchedulerOptions, 'device' | 'heartbeat' | 'now'>) {
    this.#options = options
  }

  /** Number of steps that have begun so far. */
  get begun (): number {
    return this.#steps
  }

  /** Number of steps whose results have been taken so far. */
  get ended (): number {
    return this.begun - this.count
  }

  get count (): number {
    return this.#begun.length
  }

  /** The step whose results come next. */
  get next (): StepBuilder | undefined {
    return this.#begun[0]?.step
  }

  /** Steps are under way, and no sequence wants their results. */
  get areUnwanted (): boolean {
    return this.count > 0 && this.#begun.every(({ step }) => step.sequences.every((_, i) => !step.isWanted(i)))
  }

  /** The next step, empty, with the weights that compute it. */
  prepare (weights: StepWeights): StepBuilder {
    const builder = this.#builders[this.#steps & 1]!
    builder.clear()
    builder.weights = weights
    builder.version = weights.version
    this.#from ??= this.#options.now()
    return builder
  }

  /** Begins the step that was prepared. Throws LostDevice, or the device's error: then it has not begun. */
  begin (step: StepBuilder): void {
    const { device, heartbeat, now } = this.#options
    heartbeat?.begin(step.sequences)
    this.#begun.push({ step, at: now() })
    try {
      device.begin(step.batch())
    } catch (error) {
      if (isLost(error)) throw this.#lost(error)
      this.#begun.pop()
      heartbeat?.cancel()
      throw error
    }
    this.#steps++
  }

  /** Waits for the first step. Throws LostDevice. */
  collect (): EndedStep {
    const { device, heartbeat, now } = this.#options
    let outcome: { result: StepResult } | { error: unknown }
    try {
      outcome = { result: device.collect() }
    } catch (error) {
      if (isLost(error)) throw this.#lost(error)
      outcome = { error }
    }
    heartbeat?.end()
    const { step, at } = this.#begun.shift()!
    const ended = now()
    const ms = ended - Math.max(at, this.#endedAt)
    const interval = ended - (this.#from ?? at)
    this.#endedAt = this.#from = ended
    return { step, ms, interval, ...outcome }
  }

  /** No step follows at once. */
  rest (): void {
    this.#from = null
  }

  #lost (error: Error): LostDevice {
    const ids = new Set(this.#begun.flatMap(({ step }) => step.sequences.map(({ id }) => id)))
    for (let i = 0; i < this.count; i++) this.#options.heartbeat?.end()
    return new LostDevice(error.message, [...ids])
  }
}
