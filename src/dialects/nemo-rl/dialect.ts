import { begin, end, join, pause, resume, UNNAMED_GROUP, weights } from '../../gateway/gateway-call.ts'
import type { GatewayCall } from '../../gateway/gateway-call.ts'
import type { JsonBody } from '../../gateway/json-body.ts'
import type { Dialect } from '../dialect.ts'
import { updateWeightsCall } from '../vllm/gateway-calls.ts'
import { KEY_HEADER } from './key-header.ts'

const keyHeader = KEY_HEADER

export const nemoRl: Dialect<'nemo-rl'> = {
  name: 'nemo-rl',
  title: 'NeMo-RL through Dynamo',
  calls: {
    '/engine/pause_generation': pause,
    '/engine/resume_generation': resume,
    '/engine/init_weights_update_group': { ...join(['init_info']), group: { name: UNNAMED_GROUP } },
    '/engine/update_weights_from_distributed': { ...weights, byBody: engineCall },
    // Changes relative to the weights that all engines hold: these calls collect them, the flush writes them.
    '/nemo-rl/refit/prepare': { to: 'members', keyHeader, announces: { kind: 'nemo-rl', isFirst: true } },
    '/nemo-rl/refit/s3-manifest': { to: 'members', keyHeader, announces: { kind: 'nemo-rl' } },
    '/nemo-rl/refit/zmq-flush': { to: 'members', keyHeader },
    '/nemo-rl/refit/flush': { ...weights, keyHeader, announcedBy: 'nemo-rl' }
  }
}

/** Dynamo's envelope around vLLM's calls. */
function engineCall (body: JsonBody): GatewayCall {
  switch (body.text('engine_rpc')) {
    case 'start_weight_update':
      return begin
    case 'finish_weight_update':
      return end
    default:
      return updateWeightsCall(body)
  }
}
