import type { StoredSource, WriteReport } from '../contract/weight-source.ts'
import { errorMessage, RefitError } from '../errors.ts'
import type { WeightGroups } from '../process-groups/weight-groups.ts'
import type { KnownPlan, ShardPlans } from '../shards/shard-plans.ts'
import { groupShards } from '../sources/shards/group-shards.ts'
import { handleShards } from '../sources/shards/handle-shards.ts'
import type { ShardParts } from '../sources/shards/shard-parts.ts'
import type { KeptName } from '../sources/tensor/kept-tensors.ts'
import { registerPending, runUpdate } from './run-update.ts'
import type { UpdateFields, UpdateOutcome, WriteSource } from './run-update.ts'
import type { TensorHost } from './tensor-update.ts'

export interface ShardHost extends TensorHost {
  /** Both are null for an engine whose parameters are not in this process. */
  readonly plans: ShardPlans | null
  readonly parts: ShardParts | null
  readonly groups: WeightGroups
}

export interface ShardUpdate extends UpdateFields {
  /** Id of the plan, and its digest if the sender knows it. */
  readonly plan: string
  readonly digest?: string | undefined
  /** Base64 of pickled handles, one text for each rank of the trainer. */
  readonly handles?: readonly string[] | undefined
  /** Keep the opened shards under this name, to be written again by `kept`. */
  readonly keep?: KeptName | null | undefined
  /** Instead of `handles`: write the shards that are kept under this name again. */
  readonly kept?: KeptName | null | undefined
  /** Instead of both: the ranks send their blocks as messages in this process group. */
  readonly groupName?: string | undefined
  /** Instead of all: the ranks upload their blocks. */
  readonly upload?: boolean | undefined
  /** The handles go to several engines, and another one gives their references back. */
  readonly borrowed?: boolean | undefined
}

/** The shard plans of an engine. Throws UNSUPPORTED for a remote one. */
export function requirePlans ({ plans }: Pick<ShardHost, 'plans'>): ShardPlans {
  if (plans !== null) return plans
  throw new RefitError('UNSUPPORTED', 'this engine is remote: announce the shards to the engine itself')
}

/** Writes the shards of a plan from the memory that the trainer's ranks share, then gives it back unless it is kept. */
export async function updateFromShards (host: ShardHost, update: ShardUpdate): Promise<UpdateOutcome> {
  const { plan: id, digest, handles, keep, kept, groupName, upload, borrowed = false, ...fields } = update
  const options = { ...fields, failurePrefix: 'Failed to update weights: ' }
  await requireOneWay(host, update)
  if (groupName !== undefined) return await updateFromGroup(host, update, options)
  if (upload === true) {
    const identity = ['shards', id, 'upload']
    return await runUpdate(host, { ...options, identity }, async write => {
      const plan = requirePlans(host).get(id, digest)
      return await write(host.parts!.open(plan))
    })
  }
  if (kept != null) {
    // Never joined: the memory may hold other bytes now than when the previous call read it.
    return await runUpdate(host, options, async write => {
      const plan = requirePlans(host).get(id, digest)
      return await host.kept.write(kept, shardWriter(plan, write))
    })
  }
  const identity = ['shards', id, JSON.stringify([keep ?? null]), ...handles ?? []]
  return await runUpdate(host, { ...options, identity }, async write => {
    const plan = await planOf(host, update)
    const source = await host.tensors.open({ entries: handles!, loadFormat: null, senders: plan.world, borrowed })
    if (keep != null) return await host.kept.keep(keep, source, shardWriter(plan, write))
    try {
      return await shardWriter(plan, write)(source as StoredSource)
    } catch (error) {
      await source.close()
      throw error
    }
  })
}

/**
 * Receives messages of the trainer's ranks. After a refusal they are received and dropped, or the group is aborted: the
 * ranks would wait for ever.
 */
async function updateFromGroup (
  host: ShardHost,
  { plan: id, digest, groupName }: ShardUpdate,
  options: UpdateFields
): Promise<UpdateOutcome> {
  const group = host.groups.get(groupName!)
  const identity = ['shards', id, 'group', groupName!]
  let isOpened = false
  return await runUpdate(host, { ...options, identity }, async write => {
    const source = groupShards(requirePlans(host).get(id, digest), group)
    isOpened = true
    return await write(source)
  })
    .catch(async (error: unknown) => {
      if (group.failure !== null || (isOpened && group.spec.backend === 'nccl')) throw error
      const plan = requirePlans(host).find(id, digest)
      if (group.spec.backend === 'nccl' && plan !== undefined && group.spec.rankOffset >= plan.world) {
        const source = groupShards(plan, group)
        await source.close()
        throw source.explain!(error)
      }
      group.abandon(`an update from shards was refused: ${errorMessage(error)}`)
      throw error
    })
}

async function requireOneWay (host: ShardHost, update: ShardUpdate): Promise<void> {
  const { handles, kept, groupName, upload } = update
  const ways = { handles, kept: kept ?? undefined, group_name: groupName, upload: upload === true ? true : undefined }
  const given = Object.entries(ways).filter(([, value]) => value !== undefined).map(([name]) => name)
  if (given.length === 1) return
  if (update.borrowed !== true) await host.tensors.discard(handles ?? [])
  const error = new RefitError(
    'INVALID_REQUEST',
    `expected one of ${Object.keys(ways).join(', ')}, got ${given.length === 0 ? 'none' : given.join(' and ')}`,
    { param: given[0] ?? 'handles' }
  )
  registerPending(host.engine, update.transaction, error)
  throw error
}

/** Releases the handles of a request that is refused before they are opened. */
async function planOf (host: ShardHost, { plan: id, digest, handles, borrowed }: ShardUpdate): Promise<KnownPlan> {
  try {
    const plan = requirePlans(host).get(id, digest)
    if (handles!.length === plan.world) return plan
    throw new RefitError(
      'INVALID_REQUEST',
      `handles: the plan has ${plan.world} ranks, each with a text of its own; got ${handles!.length}`,
      { param: 'handles' }
    )
  } catch (error) {
    if (borrowed !== true) await host.tensors.discard(handles ?? [])
    throw error
  }
}

function shardWriter (plan: KnownPlan, write: WriteSource): (source: unknown) => Promise<WriteReport> {
  return async source => await write(handleShards(plan, source as StoredSource))
}
