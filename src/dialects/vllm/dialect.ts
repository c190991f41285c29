import {
  any,
  begin,
  end,
  GET,
  join,
  leave,
  loadsAdapter,
  memory,
  one,
  paths,
  pause,
  read,
  resume,
  state,
  unloadsAdapter,
  UNNAMED_GROUP,
  weights
} from '../../gateway/gateway-call.ts'
import type { Dialect } from '../dialect.ts'
import { collectiveRpcCall, updateWeightsCall } from './gateway-calls.ts'

export const vllm: Dialect<'vllm'> = {
  name: 'vllm',
  title: "vLLM's own, for RL: pause, sleep, weight transfer, `/inference/v1/generate`",
  calls: {
    ...paths(one, '/v1/chat/completions/render', '/inference/v1/generate'),
    '/version': any,
    '/liveness': { ...any, auth: 'public' },
    '/get_world_size': { ...any, methods: GET, describe: (_, { ranks }) => ({ world_size: ranks }) },
    '/weight_info': read({ agree: 'weight_version' }),
    '/is_paused': read({ every: ['is_paused'] }),
    '/is_sleeping': read({ every: ['is_sleeping'] }),
    '/pause': pause,
    '/resume': resume,
    ...paths(
      state,
      '/reset_prefix_cache',
      '/reset_mm_cache',
      '/reset_encoder_cache',
      '/start_draft_weight_update'
    ),
    ...paths(memory, '/sleep', '/wake_up', '/release_kv_cache_memory'),
    ...paths({ ...state, merge: { sum: ['aborted'] } }, '/abort_requests', '/inference/v1/abort_requests'),
    '/load': read({ sum: ['server_load'] }),
    '/weight_checker': { ...state, merge: { every: ['match'], join: ['mismatches'] } },

    '/init_weight_transfer_engine': { ...join(['init_info']), group: { name: UNNAMED_GROUP } },
    '/shutdown_weight_transfer_engine': { ...leave, group: { name: UNNAMED_GROUP } },
    '/start_weight_update': begin,
    '/update_weights': { ...weights, byBody: updateWeightsCall },
    '/finish_weight_update': end,
    '/collective_rpc': { to: 'all', byBody: collectiveRpcCall },
    '/v1/load_lora_adapter': loadsAdapter,
    '/v1/unload_lora_adapter': unloadsAdapter
  }
}
