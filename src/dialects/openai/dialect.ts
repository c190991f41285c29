import { any, GET, one, paths } from '../../gateway/gateway-call.ts'
import type { Dialect } from '../dialect.ts'

export const openai: Dialect<'openai'> = {
  name: 'openai',
  title: 'OpenAI',
  calls: {
    ...paths(one, '/v1/completions', '/v1/chat/completions', '/v1/responses'),
    // No POST: a proxy before an engine may resolve the `..` of a model's name.
    ...paths({ ...any, methods: GET }, '/v1/models', '/v1/models/*')
  }
}
