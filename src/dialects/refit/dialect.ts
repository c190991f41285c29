import { begin, BOTH, end, GET, read, state } from '../../gateway/gateway-call.ts'
import type { Dialect } from '../dialect.ts'

const PLANS = 'a plan belongs to one engine: announce shards to the engines of /workers, and update them there'

export const refit: Dialect<'refit'> = {
  name: 'refit',
  title: "refit's own",
  calls: {
    '/release_kept_tensors': state,
    '/adapters': { ...read(), to: 'members' },
    '/report': { to: 'members', methods: GET },
    '/adapters/*': { to: 'members', methods: ['GET', 'POST', 'DELETE'], streamsBody: true, adapter: 'path' },
    '/begin_weight_update': begin,
    '/end_weight_update': end,
    '/weight_transactions': { ...begin, methods: BOTH, sharesId: true },
    '/weight_transactions/:id': { to: 'members', methods: GET },
    '/weight_transactions/:id/commit': end,
    '/weight_transactions/:id/abort': { to: 'members' }
  },
  refusedByGateway: {
    '/ui/state': 'the page of the gateway reads its engines itself; call an engine of /workers',
    '/adapter_files/*': 'the gateway reads adapters itself for engines that join; call an engine of /workers',
    '/shard_plans': PLANS,
    '/shard_plans/:id': PLANS,
    '/shard_plans/:id/sources/:source': PLANS,
    '/shard_plans/:id/parts/:source': PLANS,
    '/update_weights_from_shards': PLANS,
    '/update_weights_from_peer':
      'engines load from a peer one by one, and the gateway starts that itself for engines that missed an update; ' +
      'call an engine of /workers'
  }
}
