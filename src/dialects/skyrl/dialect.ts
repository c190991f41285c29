import { broadcast, join, loadsAdapter, one, state } from '../../gateway/gateway-call.ts'
import type { Dialect } from '../dialect.ts'

export const skyrl: Dialect<'skyrl'> = {
  name: 'skyrl',
  title: 'SkyRL',
  calls: {
    '/skyrl/v1/generate': one,
    '/finish_session': state,
    '/init_weight_update_communicator': join(),
    '/update_weights_skyrl': broadcast,
    // It changes files of a host, and a host whose engine is not ready yet needs them too.
    '/fetch_weights': { to: 'members', merge: { join: ['result'] } },
    '/skyrl/v1/load_lora_adapter': loadsAdapter
  }
}
