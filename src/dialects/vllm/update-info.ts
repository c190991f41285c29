import { Type } from 'typebox'
import type { Static } from 'typebox'
import { RefitError } from '../../errors.ts'
import { nullable, unused } from '../../http/schemas.ts'
import { bodyCheck } from '../../http/validation.ts'
import { requireValid } from '../require-valid.ts'

// update_info of vLLM's /update_weights, for every transfer.

const NAME = 'update_info'

const Names = Type.Array(Type.String())
const common = {
  weight_version: nullable(Type.String(), "refit's own: the label of the new weights."),
  flush_cache: Type.Optional(Type.Boolean({ description: "refit's own: drop the prefix cache (default true)." }))
}
const lists = { names: Names, dtype_names: Names, shapes: Type.Array(Type.Array(Type.Integer({ minimum: 0 }))) }

const BroadcastInfo = Type.Object({
  ...lists,
  ...common,
  packed: Type.Optional(Type.Boolean()),
  packed_buffer_size_bytes: Type.Optional(Type.Integer({ minimum: 0 })),
  packed_num_buffers: unused()
})
const Sizes = Type.Array(Type.Integer({ minimum: 0 }))
const HandlesInfo = Type.Object({
  ...lists,
  ...common,
  ipc_handles_pickled: Type.String(),
  tensor_sizes: nullable(Sizes),
  sizes: nullable(Sizes)
})
const DiskInfo = Type.Object({ ...common, path: Type.String({ minLength: 1 }) })
/** SkyRL's deltas; /fetch_weights has loaded them before. */
const DeltaUpdate = Type.Object({ ...common, target_version: Type.Integer({ minimum: 0 }) })

export type BroadcastInfo = Static<typeof BroadcastInfo>
export type HandlesInfo = Static<typeof HandlesInfo>
export type DiskInfo = Static<typeof DiskInfo>
export type DeltaUpdate = Static<typeof DeltaUpdate>

/** `broken-broadcast`: invalid, but the trainer broadcasts anyway. */
export type UpdateInfo =
  | { kind: 'broadcast', info: BroadcastInfo }
  | { kind: 'broken-broadcast', fields: Readonly<Record<string, unknown>>, error: RefitError }
  | { kind: 'handles', info: HandlesInfo }
  | { kind: 'disk', info: DiskInfo }
  | { kind: 'delta', info: DeltaUpdate }

const check = {
  broadcast: bodyCheck(BroadcastInfo),
  handles: bodyCheck(HandlesInfo),
  disk: bodyCheck(DiskInfo),
  delta: bodyCheck(DeltaUpdate)
}

/** Throws INVALID_REQUEST and UNSUPPORTED. */
export function readUpdateInfo (value: unknown): UpdateInfo {
  const fields = pickOne(value)
  const has = (name: string): boolean => fields[name] != null
  if (has('path')) return { kind: 'disk', info: requireValid<DiskInfo>(check.disk(fields), NAME) }
  if (has('target_version')) return { kind: 'delta', info: requireValid<DeltaUpdate>(check.delta(fields), NAME) }
  if (has('ipc_handles_pickled')) {
    const info = requireValid<HandlesInfo>(check.handles(fields), NAME)
    if (info.tensor_sizes != null && info.sizes != null) {
      throw new RefitError('INVALID_REQUEST', 'update_info: tensor_sizes (bytes) and sizes (elements) at once', {
        param: 'sizes'
      })
    }
    return { kind: 'handles', info }
  }
  if (has('ipc_handles')) {
    throw new RefitError(
      'UNSUPPORTED',
      "update_info: ipc_handles are objects of the trainer's process, which JSON cannot carry; " +
        'send ipc_handles_pickled, base64 of them pickled',
      { param: 'ipc_handles' }
    )
  }
  try {
    if (has('num_updates_list')) {
      throw new RefitError(
        'UNSUPPORTED',
        'update_info: num_updates_list belongs to sparse_nccl, which sends only changed elements and is not ' +
          'supported; send whole tensors (backend "nccl")',
        { param: 'num_updates_list' }
      )
    }
    return { kind: 'broadcast', info: requireValid<BroadcastInfo>(check.broadcast(fields), NAME) }
  } catch (error) {
    return { kind: 'broken-broadcast', fields, error: error as RefitError }
  }
}

/** Newer clients may send a list with one object for each worker; here all of them must be equal. */
function pickOne (value: unknown): Record<string, unknown> {
  const list: unknown[] = Array.isArray(value) ? value : [value]
  const [first] = list
  if (typeof first !== 'object' || first === null) {
    throw new RefitError('INVALID_REQUEST', 'update_info: is required, an object', { param: 'update_info' })
  }
  const text = list.length > 1 ? JSON.stringify(first) : ''
  if (list.slice(1).some(other => JSON.stringify(other) !== text)) {
    throw new RefitError(
      'UNSUPPORTED',
      'update_info: it differs between workers; send the same one for all of them',
      { param: 'update_info' }
    )
  }
  return first as Record<string, unknown>
}
