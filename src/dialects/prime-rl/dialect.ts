import { join, one, UNNAMED_GROUP } from '../../gateway/gateway-call.ts'
import type { Dialect } from '../dialect.ts'

export const primeRl: Dialect<'prime-rl'> = {
  name: 'prime-rl',
  title: 'prime-rl',
  calls: {
    '/v1/chat/completions/tokens': one,
    '/init_broadcaster': { ...join([], 'rank_offset', 'inference_world_size'), group: { name: UNNAMED_GROUP } }
  }
}
