import { STATUS_CODES } from 'node:http'
import type { FastifyError, FastifyReply, FastifyRequest } from 'fastify'
import { RefitError } from '../errors.ts'
import type { ErrorCode } from '../errors.ts'
import { RETRY_AFTER_SECONDS } from './limits.ts'

/**
 * The form of a route's refusals. `sglang`: flat fields and `error.message`, so readers of either find the text.
 * `weights`: `success: false` with the message. `lora`: the fields of SGLang's adapter routes. `openai`: an `error`
 * object. A dialect with another form has a function.
 */
export type ErrorForm = 'sglang' | 'weights' | 'lora' | 'openai' | ((refusal: Refusal) => Record<string, unknown>)

declare module 'fastify' {
  interface FastifyContextConfig {
    /** Form of this route's refusals (default `sglang`). */
    errors?: ErrorForm
    /** Statuses of this route where its owner has others than src/errors.ts. */
    statuses?: Readonly<Partial<Record<ErrorCode, number>>>
  }
}

export interface Refusal {
  status: number
  /** A code of src/errors.ts, or Fastify's own (FST_ERR_…) if Fastify refused first. */
  code: string
  message: string
  param: string | null
  /** Fields beside those of the form. */
  details?: Readonly<Record<string, unknown>> | undefined
}

const OPENAI_TYPES: Record<number, string> = {
  401: 'authentication_error',
  403: 'permission_error',
  404: 'not_found_error',
  409: 'conflict_error',
  503: 'unavailable_error',
  504: 'timeout_error'
}

/** The reply to a client for an error. The message of a defect is only logged. */
export function refusalOf (error: unknown): Refusal {
  if (error instanceof RefitError) {
    return {
      status: error.statusCode,
      code: error.code,
      message: error.message,
      param: error.param ?? null,
      details: error.details
    }
  }
  const { statusCode = 500, code = 'INTERNAL', message = '' } = error as Partial<FastifyError>
  if (statusCode < 400 || statusCode >= 500) {
    return { status: 500, code: 'INTERNAL', message: "internal error; see the server's log", param: null }
  }
  if (code === 'FST_ERR_CTP_BODY_TOO_LARGE') {
    return { status: 413, code: 'BODY_TOO_LARGE', message: 'the body is larger than this route accepts', param: null }
  }
  return { status: statusCode, code, message, param: null }
}

export function refusalBody (form: ErrorForm, refusal: Refusal): Record<string, unknown> {
  if (typeof form === 'function') return form(refusal)
  const { status, code, message, param, details } = refusal
  if (form === 'openai') {
    const type = OPENAI_TYPES[status] ?? (status < 500 ? 'invalid_request_error' : 'server_error')
    return { error: { message, type, param, code }, ...details }
  }
  // SGLang's whole body for these two.
  if (code === 'UNAUTHORIZED' || code === 'FORBIDDEN') return { error: status === 401 ? 'Unauthorized' : 'Forbidden' }
  if (form === 'lora') {
    return {
      rid: null,
      http_worker_ipc: null,
      success: false,
      error_message: message,
      loaded_adapters: null,
      error: { message, code }
    }
  }
  if (form === 'weights') return { success: false, message, error: { message, code } }
  return {
    object: 'error',
    message,
    type: STATUS_CODES[status] ?? String(status),
    param,
    code: status,
    error: { message, code },
    ...details
  }
}

export function errorFormOf (request: FastifyRequest): ErrorForm {
  return request.routeOptions.config.errors ?? 'sglang'
}

function ofRoute (refusal: Refusal, { routeOptions }: FastifyRequest): Refusal {
  const status = routeOptions.config.statuses?.[refusal.code as ErrorCode]
  return status === undefined ? refusal : { ...refusal, status }
}

export function errorHandler (error: unknown, request: FastifyRequest, reply: FastifyReply): FastifyReply {
  const refusal = ofRoute(refusalOf(error), request)
  // 503 reports the server's state, which is no defect, unless another error caused it.
  if (refusal.status === 503 && (error as RefitError).cause === undefined) {
    request.log.warn(
      { code: refusal.code },
      refusal.message
    )
  } else if (refusal.status >= 500) request.log.error({ err: error }, refusal.message)
  else request.log.info({ code: refusal.code, param: refusal.param }, refusal.message)
  if (refusal.status === 503 || refusal.code === 'WEIGHT_VERSION') reply.header('retry-after', RETRY_AFTER_SECONDS)
  // Otherwise the server would read the rest of the body to its end.
  if (refusal.status === 413) reply.header('connection', 'close')
  if (refusal.status === 401) reply.header('www-authenticate', 'Bearer')
  return reply.code(refusal.status).send(refusalBody(errorFormOf(request), refusal))
}
