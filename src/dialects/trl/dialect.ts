import { any, GET, one, paths, state } from '../../gateway/gateway-call.ts'
import type { GatewayCall } from '../../gateway/gateway-call.ts'
import type { Dialect } from '../dialect.ts'

const initCommunicator: GatewayCall = {
  to: 'all',
  oneEngineOnly: 'it makes one engine rank 0 of a group that has one engine'
}

// TRL sends some of these paths with a slash at the end and some without, by version.
export const trl: Dialect<'trl'> = {
  name: 'trl',
  title: "TRL's `vllm-serve`",
  calls: {
    ...paths(one, '/generate/', '/chat/', '/get_sequence_logprobs/'),
    '/health/': { ...any, auth: 'public' },
    '/get_world_size/': { ...any, methods: GET, describe: (_, { ranks }) => ({ world_size: ranks }) },
    '/get_tensor_parallel_size/': {
      ...any,
      methods: GET,
      describe: (_, { ranks }) => ({ tensor_parallel_size: ranks })
    },
    '/reset_prefix_cache/': state,
    ...paths(initCommunicator, '/init_communicator', '/init_communicator/'),
    ...paths({ to: 'all', effect: 'weights' }, '/update_named_param', '/update_named_param/'),
    ...paths({ to: 'all' }, '/close_communicator', '/close_communicator/')
  }
}
