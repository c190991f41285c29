import { RefitError } from '../../errors.ts'
import { GROUP_NAME, updateFromDistributed } from '../../updates/distributed-update.ts'
import { adapterRefusal } from '../../http/adapters.ts'
import type { RouteContext } from '../../http/context.ts'
import type { UpdateOutcome } from '../../updates/run-update.ts'

/** What AReaL announces for the next bucket of one group. */
export interface ArealBucket {
  names: string[]
  dtypes: string[]
  shapes: number[][]
  group_name: string
}

/**
 * AReaL's vLLM mode updates a bucket in two requests: one brings names, dtypes and shapes, the next one, which is empty, takes what is
 * broadcast. What was announced is good for one update, so that a repeated request waits for nothing that nobody sends.
 */
export class ArealBuckets {
  readonly #context: RouteContext
  #announced: ArealBucket | null = null
  #running: Promise<UpdateOutcome> | null = null

  constructor (context: RouteContext) {
    this.#context = context
  }

  /** Throws NOT_FOUND, or what the group failed by. What was announced and not taken before is forgotten, as in AReaL's own server. */
  announce (bucket: ArealBucket): void {
    this.#context.groups.get(bucket.group_name)
    this.#announced = bucket
  }

  /** Receives, writes and answers for the bucket that was announced last; a second call joins the first. CONFLICT where there is none. */
  async update (): Promise<UpdateOutcome> {
    const bucket = this.#announced
    if (bucket === null) {
      if (this.#running !== null) return await this.#running
      throw new RefitError(
        'CONFLICT',
        'no bucket is announced since the last update: call /areal_set_update_weight_meta before each /areal_update_weights_xccl. Nothing was received'
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

  /** Adapters are refused, but their tensors are broadcast whatever is answered: they are received and dropped, or the group is aborted. */
  async refuseAdapter (body: Readonly<Record<string, unknown>>): Promise<RefitError> {
    const note = await this.#context.distributed.refuse(body, GROUP_NAME)
    return arealAdapterRefusal(body, note)
  }
}

/** The refusal of an adapter, with AReaL's own option. `note`: what became of its tensors. */
export function arealAdapterRefusal (body: unknown, note?: string): RefitError {
  const advice = 'Train without use_lora, or merge the adapter and send whole weights'
  return adapterRefusal(body, { advice, ...note === undefined ? {} : { note } })
}

/** What AReaL's server says of every rank. */
export function rankWords (ranks: number): string {
  return Array.from({ length: ranks }, (_, rank) => `TP rank: ${rank} success\n`).join('')
}
