import { Type } from 'typebox'
import type { Static } from 'typebox'
import type { ServingEngine } from '../../contract/rollout-engine.ts'
import { RefitError } from '../../errors.ts'
import { trailingNumber } from '../metrics.ts'
import { invalid } from '../refuse.ts'
import type { Sample } from './sample.ts'
import { nullable } from '../schemas.ts'

// Requests that name the weights they need. Labels are compared by the integer at their end: 7 of "7", "step-7" and
// "run/weight_v000007".

const Version = Type.Union([Type.Integer(), Type.String()])

/** Fields of requests for generation. The first is Stitch's. */
export const versionFields = {
  weight_version: nullable(
    Type.Object({ min_version: nullable(Type.Integer()), exact_version: nullable(Type.Integer()) }),
    'The weights that the request needs, by the integer at the end of their label. It waits for them for at most ' +
      '--version-wait seconds, then it is refused with 409; `exact_version` has precedence.'
  ),
  min_weight_version: nullable(Version, 'The same as `weight_version.min_version`, or a label that ends in it.'),
  exact_weight_version: nullable(Version, 'The same as `weight_version.exact_version`; a text is the whole label.')
}

type VersionFields = Static<Type.TObject<typeof versionFields>>

/** The weights that a request is bound to. */
export interface BoundVersion {
  target: number | string
  suits: (label: string) => boolean
  /** The label has gone beyond the wanted one, so waiting is in vain. */
  isPast: (label: string) => boolean
}

/** Undefined if the request takes any weights. */
export function boundVersion (body: VersionFields): BoundVersion | undefined {
  const { min_version: min, exact_version: exact } = body.weight_version ?? {}
  const wanted = exact ?? body.exact_weight_version ?? undefined
  if (typeof wanted === 'string') return { target: wanted, suits: label => label === wanted, isPast: () => false }
  if (wanted !== undefined) {
    return {
      target: wanted,
      suits: label => trailingNumber(label) === wanted,
      isPast: label => trailingNumber(label) > wanted
    }
  }
  const least = min ?? body.min_weight_version ?? undefined
  if (least === undefined) return undefined
  const number = typeof least === 'string' ? trailingNumber(least) : least
  if (Number.isNaN(number)) {
    throw invalid('min_weight_version', `expected a label that ends in an integer, got ${JSON.stringify(least)}`)
  }
  return { target: number, suits: label => trailingNumber(label) >= number, isPast: () => false }
}

export const VersionStamps = {
  weight_version_start: Type.Optional(Type.Integer({
    description: 'The integer at the end of the label of the first weights used; absent without one.'
  })),
  weight_version_end: Type.Optional(Type.Integer({ description: 'The same of the last weights used.' }))
}

export function stampsOf (samples: readonly Sample[]): Partial<Record<keyof typeof VersionStamps, number>> {
  const starts = samples.map(({ spans, weightVersion }) => trailingNumber(spans[0]?.version ?? weightVersion))
  const ends = samples.map(({ spans, weightVersion }) => trailingNumber(spans.at(-1)?.version ?? weightVersion))
  const [start, end] = [Math.min(...starts), Math.max(...ends)]
  return {
    ...Number.isNaN(start) ? {} : { weight_version_start: start },
    ...Number.isNaN(end) ? {} : { weight_version_end: end }
  }
}

/** The refusal in Stitch's form, beside the fields of every refusal. */
export function notReady ({ target }: BoundVersion, label: string, why: string): RefitError {
  const message = `the request needs weight version ${JSON.stringify(target)}, and this engine has ` +
    `${JSON.stringify(label)}: ${why}`
  return new RefitError('WEIGHT_VERSION', message, {
    param: 'weight_version',
    details: { type: 'WeightVersionNotReady', target_version: target, applied: label, message }
  })
}

/** Labels move by many ways and report nothing, so they are read this often while requests wait. */
const READ_MS = 10

interface Waiting {
  bound: BoundVersion
  deadline: number
  isAborted: () => boolean
  resolve: () => void
  reject: (error: Error) => void
}

/** Holds requests until the engine has the weights that they are bound to. */
export class VersionWaits {
  readonly #engine: Pick<ServingEngine, 'weightVersion'>
  readonly #waitMs: number
  readonly #waiting = new Set<Waiting>()
  #timer: NodeJS.Timeout | undefined

  constructor (engine: Pick<ServingEngine, 'weightVersion'>, waitMs: number) {
    this.#engine = engine
    this.#waitMs = waitMs
  }

  /** Resolves at the label or the abort; throws WEIGHT_VERSION at the deadline, or at once if waiting is in vain. */
  async until (bound: BoundVersion, isAborted: () => boolean): Promise<void> {
    await new Promise<void>((resolve, reject) => {
      this.#waiting.add({ bound, deadline: performance.now() + this.#waitMs, isAborted, resolve, reject })
      this.#read()
    })
  }

  #read (): void {
    const label = this.#engine.weightVersion
    for (const waiting of this.#waiting) {
      const { bound, deadline, isAborted, resolve, reject } = waiting
      const isOver = performance.now() >= deadline
      if (bound.suits(label) || isAborted()) resolve()
      else if (bound.isPast(label)) reject(notReady(bound, label, 'it has newer ones'))
      else if (isOver) reject(notReady(bound, label, `they did not come within ${this.#waitMs / 1000} s`))
      else continue
      this.#waiting.delete(waiting)
    }
    if (this.#waiting.size > 0) {
      this.#timer ??= setInterval(() => {
        this.#read()
      }, READ_MS)
    } else {
      clearInterval(this.#timer)
      this.#timer = undefined
    }
  }
}
