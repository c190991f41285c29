import type { Refusal } from '../../http/error-reply.ts'

/** The body of a refusal, as NeMo-RL's receiver sends it. */
export function nemoRlError ({ message, code }: Refusal): Record<string, unknown> {
  return { ok: false, error: message, code }
}
