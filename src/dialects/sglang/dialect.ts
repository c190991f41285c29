import {
  any,
  broadcast,
  GET,
  join,
  label,
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
  weights
} from '../../gateway/gateway-call.ts'
import type { GatewayCall } from '../../gateway/gateway-call.ts'
import type { Dialect } from '../dialect.ts'
import { changesWeightsCheck } from './weights-check.ts'

const NAME_AN_ENGINE = 'weights are taken from one engine: name one of /workers in --load-from, not the gateway'

/** Trainers read the number of ranks here. */
const serverInfo: GatewayCall = {
  to: 'any',
  auth: 'normal',
  methods: GET,
  describe: (info, { ranks, engines }) => ({
    ...info,
    // As SGLang counts with attention in data parallel: tp_size contains dp_size.
    tp_size: ranks,
    dp_size: engines.length,
    pp_size: 1,
    ...info['num_gpus'] === undefined ? {} : { num_gpus: ranks },
    ...info['vllm_config'] === undefined ? {} : { vllm_config: withReplicas(info['vllm_config'], engines.length) },
    engines
  })
}

/** vLLM's sizes are those of one replica, and the number of replicas. */
function withReplicas (config: unknown, size: number): object {
  const { parallel_config: parallel, ...rest } = config as { parallel_config?: object }
  return { ...rest, parallel_config: { ...parallel, data_parallel_size: size } }
}

export const sglang: Dialect<'sglang'> = {
  name: 'sglang',
  title: 'SGLang',
  calls: {
    '/generate': { ...one, methods: ['POST', 'PUT'] },
    ...paths(one, '/tokenize', '/detokenize', '/v1/tokenize', '/v1/detokenize'),
    ...paths(any, '/parse_function_call', '/separate_reasoning'),
    ...paths(any, '/', '/model_info', '/get_model_info', '/parallelism_config'),
    ...paths(serverInfo, '/server_info', '/get_server_info'),
    '/health_generate': { ...any, auth: 'public' },
    ...paths(
      { ...any, auth: 'admin' },
      '/get_weights_by_name',
      '/remote_instance_transfer_engine_info',
      '/get_remote_instance_transfer_engine_info'
    ),
    ...paths(read({ agree: 'weight_version' }), '/weight_version', '/get_weight_version'),
    ...paths(read({ join: ['loads'] }), '/get_load', '/v1/loads'),

    '/pause_generation': pause,
    '/continue_generation': resume,
    // Trainers send GET (slime, NeMo-RL, verl).
    '/flush_cache': { ...state, ownHeader: false },
    ...paths(state, '/abort_request', '/post_process_weights', '/start_profile', '/stop_profile'),
    ...paths(memory, '/release_memory_occupation', '/resume_memory_occupation'),
    '/weights_checker': { ...state, ownHeader: changesWeightsCheck, merge: { agree: 'checksums' } },

    '/update_weights_from_disk': { ...weights, checkpoint: ['model_path'] },
    '/update_weights_from_tensor': { ...weights, perRank: ['serialized_named_tensors'] },
    '/init_weights_update_group': join(),
    '/update_weights_from_distributed': broadcast,
    '/destroy_weights_update_group': leave,
    '/update_weight_version': label,
    // It changes files of a host, and a host whose engine is not ready yet needs them too.
    '/pull_weights': { to: 'members' },
    '/load_lora_adapter': loadsAdapter,
    '/unload_lora_adapter': unloadsAdapter,
    '/load_lora_adapter_from_tensors': { ...loadsAdapter, perRank: ['serialized_named_tensors'] },
    '/load_lora_adapter_from_distributed': { ...loadsAdapter, to: 'group' }
  },
  refusedByGateway: {
    '/remote_instance_weights_info': NAME_AN_ENGINE,
    '/init_weights_send_group_for_remote_instance': NAME_AN_ENGINE,
    '/send_weights_to_remote_instance': NAME_AN_ENGINE
  }
}
