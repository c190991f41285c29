import { withPrefix } from '../errors.ts'
import type { DistributedReceiver } from '../sources/distributed/distributed.ts'
import { runUpdate } from './run-update.ts'
import type { UpdateFields, UpdateHost, UpdateOutcome } from './run-update.ts'

export const GROUP_NAME = 'weight_update_group'

export interface DistributedHost extends UpdateHost {
  readonly distributed: DistributedReceiver
}

export interface DistributedUpdate extends UpdateFields {
  readonly names: readonly string[]
  readonly dtypes: readonly string[]
  readonly shapes: ReadonlyArray<readonly number[]>
  /** Default GROUP_NAME. */
  readonly groupName?: string | undefined
  /** "flattened_bucket": one broadcast of all tensors' bytes. Anything else: one broadcast for each tensor. */
  readonly loadFormat?: string | null | undefined
}

/**
 * Receives the trainer's broadcasts and writes them, then returns. The tensors of a refused request are received and
 * dropped first.
 */
export async function updateFromDistributed (
  host: DistributedHost,
  { names, dtypes, shapes, groupName = GROUP_NAME, loadFormat = null, ...fields }: DistributedUpdate
): Promise<UpdateOutcome> {
  const identity = ['distributed', JSON.stringify([groupName, loadFormat, names, dtypes, shapes])]
  return await runUpdate(
    host,
    { ...fields, identity },
    async write => await write(await host.distributed.open({ names, dtypes, shapes, groupName, loadFormat }))
  )
    .catch((error: unknown) => {
      throw withPrefix('Failed to update parameter online: ', error)
    })
}
