import type { Refusal } from '../../http/error-reply.ts'

const TYPES: Record<number, string> = {
  401: 'authentication_error',
  403: 'permission_error',
  404: 'not_found_error',
  413: 'request_too_large',
  429: 'rate_limit_error',
  503: 'overloaded_error',
  504: 'timeout_error'
}

/** Anthropic's refusals. `code` and `param` are refit's own. */
export function anthropicErrors ({ status, code, message, param }: Refusal): Record<string, unknown> {
  const type = TYPES[status] ?? (status < 500 ? 'invalid_request_error' : 'api_error')
  return { type: 'error', error: { type, message, code, param } }
}
