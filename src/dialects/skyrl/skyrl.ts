import { Type } from 'typebox'
import type { Static } from 'typebox'
import { RefitError } from '../../errors.ts'
import type { UpdatesContext } from '../../http/context.ts'
import { nullable } from '../../http/schemas.ts'
import { bodyCheck } from '../../http/validation.ts'
import type { WriteReport } from '../../contract/weight-source.ts'
import { weightTransferOf } from '../vllm/transfer.ts'
import { memoize } from '../memoize.ts'

// The routes that old SkyRL versions call: a torch process group, and one request for each chunk, whose tensors are one
// broadcast. Newer versions call methods of /collective_rpc (src/dialects/vllm/collective-rpc.ts).

export interface OldInit {
  /** Later versions have `master_addr`. */
  master_address?: string | undefined
  master_addr?: string | undefined
  master_port: number
  rank_offset: number
  world_size: number
  group_name: string
  backend: string
  /** Later versions have `override_existing_receiver`. */
  override_existing?: boolean | undefined
  override_existing_receiver?: boolean | undefined
}

/** `sizes`: elements of each tensor; without it, each tensor is its own broadcast. */
const OldUpdate = Type.Object({
  names: Type.Array(Type.String()),
  dtypes: Type.Array(Type.String()),
  shapes: Type.Array(Type.Array(Type.Integer({ minimum: 0 }))),
  sizes: nullable(Type.Array(Type.Integer({ minimum: 0 })))
})
type OldUpdate = Static<typeof OldUpdate>
const check = bodyCheck(OldUpdate)

class OldSkyrl {
  readonly #context: UpdatesContext
  #group: string | null = null

  constructor (context: UpdatesContext) {
    this.#context = context
  }

  async init (init: OldInit): Promise<void> {
    const {
      master_address: first,
      master_addr: address = first,
      master_port: port,
      rank_offset: rankOffset,
      world_size: worldSize,
      group_name: name,
      backend
    } = init
    if (address === undefined) {
      throw new RefitError('INVALID_REQUEST', 'master_addr: is required', { param: 'master_addr' })
    }
    const { groups } = this.#context
    const renew = init.override_existing_receiver ?? init.override_existing ?? false
    const isThere = groups.list.some(group => group.name === name && group.error === null)
    // SkyRL's own engines keep an existing group silently.
    if (!isThere || renew) await groups.init({ name, backend, address, port, rankOffset, worldSize }, { renew })
    this.#group = name
  }

  async update (fields: Readonly<Record<string, unknown>>): Promise<WriteReport> {
    const groupName = this.#group
    const { names, dtypes, shapes, sizes = null } = fields
    const identity = ['skyrl', JSON.stringify([names, dtypes, shapes, sizes])]
    return await weightTransferOf(this.#context).receive(async () => {
      const checked = check(fields)
      if ('error' in checked) throw await this.#refusal(checked.error as RefitError, fields)
      const { names, dtypes, shapes, sizes } = checked.value as OldUpdate
      if (groupName === null) {
        throw new RefitError(
          'CONFLICT',
          'no process group has been joined: call /init_weight_update_communicator first'
        )
      }
      const error = sizes == null ? undefined : wrongSizes(names, shapes, sizes)
      if (error !== undefined) throw await this.#refusal(error, {})
      return { names, dtypes, shapes, groupName, packing: sizes == null ? 'each' : 'whole' }
    }, { identity })
  }

  /** The trainer broadcasts even if its request is invalid, so the broadcast is received and dropped. */
  async #refusal (
    { message, param }: RefitError,
    { names, dtypes, shapes, sizes }: Readonly<Record<string, unknown>>
  ): Promise<RefitError> {
    const note = this.#group === null
      ? undefined
      : await this.#context.distributed.refuse({ names, dtypes, shapes }, this.#group, sizes == null ? 'each' : 'whole')
    return new RefitError(
      'INVALID_REQUEST',
      note === undefined ? message : `${message}. ${note}`,
      param === undefined ? {} : { param }
    )
  }
}

function wrongSizes (
  names: readonly string[],
  shapes: ReadonlyArray<readonly number[]>,
  sizes: readonly number[]
): RefitError | undefined {
  const at = sizes.length === shapes.length
    ? sizes.findIndex((size, index) => size !== shapes[index]!.reduce((a, b) => a * b, 1))
    : sizes.length
  if (at < 0) return undefined
  const what = at < sizes.length
    ? `${sizes[at]} elements for [${shapes[at]!.join(', ')}] of "${names[at]}"`
    : `${sizes.length} for ${shapes.length} shapes`
  return new RefitError('INVALID_REQUEST', `sizes: ${what}`, { param: 'sizes' })
}

const oldSkyrl = memoize((context: UpdatesContext) => new OldSkyrl(context))

/** `/init_weight_update_communicator`. Throws as WeightGroups.init does. */
export async function initOldSkyrl (context: UpdatesContext, init: OldInit): Promise<void> {
  await oldSkyrl(context).init(init)
}

/** Writes one chunk. A refused chunk has been received and dropped, or its group has been aborted. */
export async function updateOldSkyrl (
  context: UpdatesContext,
  fields: Readonly<Record<string, unknown>>
): Promise<WriteReport> {
  return await oldSkyrl(context).update(fields)
}
