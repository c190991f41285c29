import { Type } from 'typebox'
import type { Static } from 'typebox'
import { RefitError } from '../../errors.ts'
import type { GroupFields } from '../../process-groups/group-spec.ts'
import { unused } from '../../http/schemas.ts'
import { bodyCheck } from '../../http/validation.ts'
import type { Packing } from '../../sources/distributed/broadcasts.ts'
import { requireValid } from '../require-valid.ts'

// init_info of vLLM's /init_weight_transfer_engine. In vLLM an option of the server chooses the kind of transfer; here
// the fields do.

/** vLLM's DEFAULT_PACKED_BUFFER_SIZE_BYTES. */
const BUFFER_BYTES = 2 ** 30
/** Name of the group of the server's only transfer engine; gloo uses it in the store's keys. */
const GROUP = 'weight_transfer'

const packing = {
  packed: Type.Optional(Type.Boolean()),
  packed_buffer_size_bytes: Type.Optional(Type.Integer({ minimum: 0 })),
  packed_num_buffers: unused()
}

/** How tensors are packed. vLLM sends it with the init since 0.26, before that with each update. */
export interface PackingFields {
  packed?: boolean
  packed_buffer_size_bytes?: number
}

const NcclInfo = Type.Object({
  master_address: Type.String({ minLength: 1 }),
  master_port: Type.Integer({ minimum: 1, maximum: 65_535 }),
  rank_offset: Type.Integer({ minimum: 0 }),
  world_size: Type.Integer({ minimum: 1, maximum: 65_535 }),
  ...packing,
  backend: Type.Optional(Type.String()),
  group_name: Type.Optional(Type.String())
})
const checkNccl = bodyCheck(NcclInfo)
const PackingInfo = Type.Object(packing)
const checkPacking = bodyCheck(PackingInfo)

/** SkyRL's deltas of checkpoints. Its other fields are about how vLLM reads files and have no effect. */
const DeltaInfo = Type.Object({
  base_model_path: Type.String({ minLength: 1 }),
  local_checkpoint_dir: Type.String({ minLength: 1 })
})
export type DeltaInfo = Static<typeof DeltaInfo>
const checkDelta = bodyCheck(DeltaInfo)

/** `group`: the group to join; null if handles or files will come. `delta`: null except for SkyRL's deltas. */
export interface InitInfo {
  group: GroupFields | null
  packing: PackingFields
  delta: DeltaInfo | null
}

/** Throws INVALID_REQUEST, and UNSUPPORTED with the name of the transfer for other transfers of vLLM. */
export function readInitInfo (value: unknown): InitInfo {
  if (typeof value !== 'object' || value === null || Array.isArray(value)) {
    throw new RefitError('INVALID_REQUEST', 'init_info: is required, an object', { param: 'init_info' })
  }
  refuseOthers(Object.keys(value))
  if (Object.hasOwn(value, 'local_checkpoint_dir')) {
    return { group: null, packing: {}, delta: requireValid<DeltaInfo>(checkDelta(value), 'init_info') }
  }
  if (!Object.hasOwn(value, 'master_address')) {
    return {
      group: null,
      packing: packingOf(requireValid<Static<typeof PackingInfo>>(checkPacking(value), 'init_info')),
      delta: null
    }
  }
  const {
    master_address: address,
    master_port: port,
    rank_offset: rankOffset,
    world_size: worldSize,
    backend = 'nccl',
    group_name: name = GROUP,
    ...rest
  } = requireValid<Static<typeof NcclInfo>>(checkNccl(value), 'init_info')
  return {
    group: { name, backend, form: 'vllm', address, port, rankOffset, worldSize },
    packing: packingOf(rest),
    delta: null
  }
}

/** Fields of an update override those of the init. */
export function toPacking (update: PackingFields, init: PackingFields): Packing {
  const {
    packed = init.packed ?? false,
    packed_buffer_size_bytes: bufferBytes = init.packed_buffer_size_bytes ?? BUFFER_BYTES
  } = update
  return packed ? { bufferBytes } : 'each'
}

function packingOf ({ packed, packed_buffer_size_bytes: bytes }: PackingFields): PackingFields {
  return {
    ...packed === undefined ? {} : { packed },
    ...bytes === undefined ? {} : { packed_buffer_size_bytes: bytes }
  }
}

const OTHERS: ReadonlyArray<readonly [fields: RegExp, transfer: string]> = [
  [/^trainer_actor/, 'sharded_rdt, in which workers pull from Ray actors'],
  [/mesh|placements/, 'nccl_m2n, which goes from shard to shard'],
  [/^nccl_unique_id/, 'a communicator whose id is in the request']
]
const HERE =
  'supported are NCCL with master_address and master_port, CUDA IPC handles (init_info {}), and checkpoints on disk ' +
  '(init_info {})'

function refuseOthers (fields: readonly string[]): void {
  for (const [sign, transfer] of OTHERS) {
    const field = fields.find(name => sign.test(name))
    if (field !== undefined) {
      throw new RefitError(
        'UNSUPPORTED',
        `init_info: ${field} belongs to ${transfer}, which is not supported; ${HERE}`,
        {
          param: 'init_info'
        }
      )
    }
  }
}
