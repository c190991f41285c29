import { begin, broadcast, end, UNNAMED_GROUP, weights } from '../../gateway/gateway-call.ts'
import type { GatewayCall } from '../../gateway/gateway-call.ts'
import type { JsonBody, Step } from '../../gateway/json-body.ts'

// Calls that depend on their body and not only on their path: vLLM's /update_weights and /collective_rpc, and the calls
// that other dialects wrap around them.

const GROUP = { name: UNNAMED_GROUP } as const

/** Each engine replies with one result per rank; the caller expects the results of all ranks. */
const RESULTS = { merge: { join: ['results'] } } as const

/** `/update_weights`: vLLM puts its fields into `update_info`; prime-rl and old SkyRL put theirs beside it. */
export function updateWeightsCall (body: JsonBody): GatewayCall {
  if (body.has('update_info')) return updateInfoCall(body, ['update_info'])
  // After prime-rl joined a group, the folder only identifies a broadcast: the call goes to the group, and the folder
  // is no checkpoint.
  if (body.get('weight_dir') !== undefined) return { ...broadcast, checkpoint: ['weight_dir'] }
  return broadcast
}

/** By the fields of `update_info`; newer clients send a list of such objects. */
function updateInfoCall (body: JsonBody, at: readonly Step[]): GatewayCall {
  const item = body.count(...at) === undefined ? at : [...at, 0]
  if (body.has(...item, 'path')) return { ...weights, checkpoint: [...item, 'path'] }
  const isLocal = ['target_version', 'ipc_handles_pickled', 'ipc_handles'].some(field => body.has(...item, field))
  return isLocal ? weights : { ...broadcast, group: GROUP }
}

/** By the method's name. */
export function collectiveRpcCall (body: JsonBody): GatewayCall {
  return RPC[body.text('method') ?? '']?.(body) ?? { to: 'all' }
}

const RPC: Readonly<Record<string, ((body: JsonBody) => GatewayCall) | undefined>> = {
  init_weight_transfer_engine: body => ({
    to: 'members',
    effect: 'join',
    group: GROUP,
    ranks: { at: argument(body, 'init_info'), offset: 'rank_offset', world: 'world_size' },
    ...RESULTS
  }),
  start_weight_update: () => ({ ...begin, ...RESULTS }),
  skyrl_start_weight_update: () => ({ ...begin, ...RESULTS }),
  update_weights: body => ({ ...updateInfoCall(body, argument(body, 'update_info')), ...RESULTS }),
  update_weights_nccl: () => ({ ...broadcast, group: GROUP, ...RESULTS }),
  update_weights_ipc: () => ({ ...weights, ...RESULTS }),
  update_weights_from_ipc: () => ({ ...weights, ...RESULTS }),
  finish_weight_update: () => ({ ...end, ...RESULTS }),
  skyrl_finish_weight_update: () => ({ ...end, ...RESULTS }),
  skyrl_sleep_for_weight_sync: () => ({ to: 'all', effect: 'memory', ...RESULTS }),
  skyrl_wake_for_weight_sync: () => ({ to: 'all', effect: 'memory', ...RESULTS })
}

/** The place of the first argument in the body: by keyword or by position, as in Python. */
function argument (body: JsonBody, name: string): readonly Step[] {
  return body.has('kwargs', name) ? ['kwargs', name] : ['args', 0]
}
