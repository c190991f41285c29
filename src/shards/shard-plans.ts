import { createHash } from 'node:crypto'
import { RefitError } from '../errors.ts'
import type { ModelTable } from '../model/architecture.ts'
import { CoveredNames } from '../weights/covered-names.ts'
import type { ShardAnnouncement } from './announcement.ts'
import { compilePlan } from './compile-plan.ts'
import type { ShardPlan } from './compile-plan.ts'

export interface KnownPlan extends ShardPlan {
  id: string
  /** SHA-256 of the announcement and of the engine's table. */
  digest: string
  /** Time that the compilation took. */
  ms: number
}

const MOST_PLANS = 8
/** Part of the digest: another number where a plan of the same announcement would send other bytes. */
const VERSION = 2

/** Compiled plans by their contents: the same announcement gets the same plan. Main thread. */
export class ShardPlans {
  readonly #table: ModelTable
  readonly #coverage: CoveredNames
  readonly #plans = new Map<string, KnownPlan>()
  #layout: string | undefined

  constructor (table: ModelTable) {
    this.#table = table
    this.#coverage = new CoveredNames(table)
  }

  /** Throws as `compilePlan`. If there are too many plans, the one that was used longest ago is forgotten. */
  announce (announced: ShardAnnouncement): { plan: KnownPlan, isNew: boolean } {
    const digest = createHash('sha256').update(this.#tableLayout()).update(JSON.stringify(announced)).digest('hex')
    const id = digest.slice(0, 16)
    const known = this.#plans.get(id)
    if (known !== undefined) return { plan: this.#used(known), isNew: false }
    const began = performance.now()
    const plan = compilePlan(this.#table, this.#coverage, announced)
    const made = { ...plan, id, digest, ms: performance.now() - began }
    this.#plans.set(id, made)
    if (this.#plans.size > MOST_PLANS) this.#plans.delete(this.#plans.keys().next().value!)
    return { plan: made, isNew: true }
  }

  get list (): KnownPlan[] {
    return [...this.#plans.values()]
  }

  /** Throws PLAN_STALE for an unknown id or another digest: the trainer announces again. */
  get (id: string, digest?: string): KnownPlan {
    const plan = this.#plans.get(id)
    if (plan === undefined) {
      throw new RefitError(
        'PLAN_STALE',
        `there is no shard plan ${JSON.stringify(id)}: the server has started anew, or has forgotten it; ` +
          'announce the shards again (POST /shard_plans)',
        { param: 'plan' }
      )
    }
    if (digest !== undefined && digest !== plan.digest) {
      throw new RefitError(
        'PLAN_STALE',
        `digest: shard plan ${id} has ${plan.digest}, the request has ${JSON.stringify(digest)}: ` +
          'announce the shards again (POST /shard_plans)',
        { param: 'digest' }
      )
    }
    return this.#used(plan)
  }

  /** Undefined where `get` throws. */
  find (id: string, digest?: string): KnownPlan | undefined {
    const plan = this.#plans.get(id)
    return digest === undefined || digest === plan?.digest ? plan : undefined
  }

  forget (id: string): boolean {
    return this.#plans.delete(id)
  }

  #used (plan: KnownPlan): KnownPlan {
    this.#plans.delete(plan.id)
    this.#plans.set(plan.id, plan)
    return plan
  }

  #tableLayout (): string {
    const { ranks, params, tensors } = this.#table
    // Names, shapes and ranks decide where each tensor lies.
    this.#layout ??= createHash('sha256')
      .update(JSON.stringify([VERSION, ranks, params, [...tensors].map(([name, { shape }]) => [name, shape])]))
      .digest('hex')
    return this.#layout
  }
}
