import { one } from '../../gateway/gateway-call.ts'
import type { Dialect } from '../dialect.ts'

/** Anthropic's clients send their key there. */
export const KEY_HEADER = 'x-api-key'

export const anthropic: Dialect<'anthropic'> = {
  name: 'anthropic',
  title: 'Anthropic Messages',
  calls: {
    '/v1/messages': { ...one, keyHeader: KEY_HEADER },
    '/v1/messages/count_tokens': { ...one, keyHeader: KEY_HEADER }
  }
}
