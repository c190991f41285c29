import { RefitError } from '../../errors.ts'
import { updateFromDistributed } from '../../updates/distributed-update.ts'
import { memoize } from '../memoize.ts'
import type { UpdatesContext } from '../../http/context.ts'
import type { UpdateOutcome } from '../../updates/run-update.ts'

/** AReaL's announcement of the next bucket of one group. */
export interface ArealBucket {
  names: string[]
  dtypes: string[]
  shapes: number[][]
  group_name: string
}

/**
 * AReaL's vLLM mode updates a bucket in two requests: the first one announces names, dtypes and shapes, the second one
 * has an empty body and receives the broadcast. An announcement counts for one update, so a repeated request does not
 * wait for a broadcast that never comes.
 */
export class ArealBuckets {
  readonly #context: UpdatesContext
  #announced: ArealBucket | null = null
  #running: Promise<UpdateOutcome> | null = null

  constructor (context: UpdatesContext) {
    this.#context = context
  }

  /**
   * Replaces an announcement that was not used, as AReaL's own server does. Throws NOT_FOUND, or the error that the
   * group failed with.
   */
  announce (bucket: ArealBucket): void {
    this.#context.groups.get(bucket.group_name)
    this.#announced = bucket
  }

  /**
   * Receives and writes the announced bucket; a second call joins the first one. Throws CONFLICT if no bucket is
   * announced.
   */
  async update (): Promise<UpdateOutcome> {
    const bucket = this.#announced
    if (bucket === null) {
      if (this.#running !== null) return await this.#running
      throw new RefitError(
        'CONFLICT',
        'no bucket is announced since the last update: call /areal_set_update_weight_meta before each ' +
          '/areal_update_weights_xccl. Nothing was received'
      )
    }
    this.#announced = null
    // AReaL's server ends running requests and drops the caches, whether or not generation is paused.
    const running = this.#running = updateFromDistributed(this.#context, {
      names: bucket.names,
      dtypes: bucket.dtypes,
      shapes: bucket.shapes,
      groupName: bucket.group_name,
      abortAllRequests: true
    })
      .finally(() => {
        if (this.#running === running) this.#running = null
      })
    return await running
  }
}

export const arealBucketsOf = memoize((context: UpdatesContext) => new ArealBuckets(context))

/** The message of AReaL's own server: one line for each rank. */
export function rankMessage (ranks: number): string {
  return Array.from({ length: ranks }, (_, rank) => `TP rank: ${rank} success\n`).join('')
}
