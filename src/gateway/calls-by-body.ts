import type { Call } from './calls.ts'
import type { JsonBody, Step } from './json-body.ts'

// Calls whose path does not say what they do: vLLM's /update_weights and the envelopes around it.

/** Calls of vLLM's transfer engine name no group; there is one. */
export const NAMELESS = 'weight_update_group'

const GROUP = { name: NAMELESS } as const
const begin: Call = { to: 'members', does: 'begin' }
const label: Call = { to: 'members', does: 'label' }
const weights: Call = { to: 'members', does: 'weights' }
const broadcast: Call = { to: 'group', does: 'weights' }

/** `/update_weights`, whose fields are at `at`: of vLLM in `update_info`, of prime-rl and the first SkyRL beside it. */
export function updateInfoCall (body: JsonBody, at: readonly Step[]): Call {
  if (body.has(...at, 'update_info')) return infoCall(body, [...at, 'update_info'])
  // Once prime-rl's group stands, the folder is only the name of what is broadcast: then those of the group are asked, and it is no checkpoint.
  if (body.get(...at, 'weight_dir') !== undefined) return { ...broadcast, checkpoint: [...at, 'weight_dir'] }
  return broadcast
}

/** By what `update_info` brings; newer clients send a list of them. */
function infoCall (body: JsonBody, at: readonly Step[]): Call {
  const one = body.count(...at) === undefined ? at : [...at, 0]
  if (body.has(...one, 'path')) return { ...weights, checkpoint: [...one, 'path'] }
  const isHere = body.has(...one, 'target_version') || body.has(...one, 'ipc_handles_pickled') ||
    body.has(...one, 'ipc_handles')
  return isHere ? weights : { ...broadcast, group: GROUP }
}

/** NeMo-RL's envelope. */
export function scopeCall (body: JsonBody): Call {
  switch (body.text('engine_rpc')) {
    case 'start_weight_update':
      return begin
    case 'finish_weight_update':
      return label
    default:
      return updateInfoCall(body, [])
  }
}

/** By position or by name, as in Python. */
function argument (body: JsonBody, name: string): readonly Step[] {
  return body.has('kwargs', name) ? ['kwargs', name] : ['args', 0]
}

/** Methods of `/collective_rpc`. */
export const RPC: Readonly<Record<string, ((body: JsonBody) => Call) | undefined>> = {
  init_weight_transfer_engine: body => ({
    to: 'members',
    does: 'join',
    group: GROUP,
    ranks: { at: argument(body, 'init_info'), offset: 'rank_offset', world: 'world_size' },
    ...RESULTS
  }),
  start_weight_update: () => ({ ...begin, ...RESULTS }),
  skyrl_start_weight_update: () => ({ ...begin, ...RESULTS }),
  update_weights: body => ({ ...infoCall(body, argument(body, 'update_info')), ...RESULTS }),
  update_weights_nccl: () => ({ ...broadcast, group: GROUP, ...RESULTS }),
  update_weights_ipc: () => ({ ...weights, ...RESULTS }),
  update_weights_from_ipc: () => ({ ...weights, ...RESULTS }),
  finish_weight_update: () => ({ ...label, ...RESULTS }),
  skyrl_finish_weight_update: () => ({ ...label, ...RESULTS }),
  skyrl_sleep_for_weight_sync: () => ({ to: 'all', does: 'memory', ...RESULTS }),
  skyrl_wake_for_weight_sync: () => ({ to: 'all', does: 'memory', ...RESULTS })
}

/** One for each rank of all engines. */
const RESULTS = { answer: { join: ['results'] } } as const
