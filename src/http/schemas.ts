import { Type } from 'typebox'
import type { TSchema } from 'typebox'

/** A field that may be left out or be null; both mean its default. */
export function nullable<T extends TSchema> (schema: T, description?: string) {
  return Type.Optional(Type.Union([schema, Type.Null()], description === undefined ? {} : { description }))
}

/** A field of replies to updates. */
export const tornTensors = Type.Integer({
  description: 'Number of tensors of the model that are still torn. Nothing is generated until they have been written.'
})

/** A field of every update of weights. */
export const transactionField = nullable(
  Type.String(),
  'Id of the weight transaction that the update belongs to (POST /weight_transactions).'
)

/** The same: how it reaches the weights. */
export const swapField = nullable(
  Type.Union([Type.Literal('auto'), Type.Literal('in_place'), Type.Literal('demand')]),
  '"auto" (default): into the second set of weights of a server with --shadow-weights, which then changes places ' +
    'with the first, else in place. "demand": 409 without a second set. Updates in a transaction are as it was opened.'
)

/** The same: whether requests that have started finish on the old weights. */
export const onRunningField = nullable(
  Type.Union([Type.Literal('continue'), Type.Literal('finish_old')]),
  '"continue" (default): requests that have started go on with the new weights. "finish_old": they finish on the ' +
    'weights before, for --old-weights-timeout at most, while new requests use the new ones; 409 without ' +
    '--shadow-weights. Updates in a transaction are as it was opened.'
)

/** A field that is accepted and changes no token and no number of a reply. */
export function unused (description = 'Accepted, and has no effect.') {
  return Type.Optional(Type.Unknown({ description, [ACCEPTED]: true }))
}

/** Marks of fields in the API document; every other field is served. */
export const ACCEPTED = 'x-refit-accepted'
export const REFUSED = 'x-refit-refused'

export interface RefusedField {
  feature: string
  /** The way out, for the error (default: leave the field out). */
  instead?: string
  /** Values that are accepted, because they mean what this server does anyway. */
  unless?: unknown[]
}

/** A field of other servers for a feature that refit does not have: `refuseFields` refuses it by name if it is set. */
export function refused (feature: string, options: Omit<RefusedField, 'feature'> = {}) {
  const accepted = ['null', ...(options.unless ?? []).map(value => JSON.stringify(value))].join(', ')
  return Type.Optional(
    Type.Unknown({
      description: `Not supported (${feature}): refused unless ${accepted} or empty.`,
      [REFUSED]: { feature, ...options } satisfies RefusedField
    })
  )
}

export const TokenIds = Type.Array(Type.Integer(), { description: 'Token ids.' })

export const Refusal = Type.Object({
  object: Type.Optional(Type.Literal('error')),
  message: Type.Optional(Type.String()),
  type: Type.Optional(Type.String()),
  param: Type.Optional(Type.Union([Type.String(), Type.Null()], { description: 'The field at fault.' })),
  code: Type.Optional(Type.Integer({ description: 'The HTTP status.' })),
  error: Type.Union([
    Type.Object({
      message: Type.String(),
      code: Type.String({ description: 'A stable code, such as INVALID_REQUEST.' })
    }),
    Type.String({ description: '"Unauthorized" or "Forbidden".' })
  ])
}, { title: 'Refusal', description: 'Refused; nothing has changed.' })

export const WeightsRefusal = Type.Object({
  success: Type.Optional(Type.Literal(false)),
  message: Type.Optional(Type.String()),
  error: Type.Union([
    Type.Object({
      message: Type.String(),
      code: Type.String({ description: 'A stable code, such as CHECKPOINT_PATH.' })
    }),
    Type.String({ description: '"Unauthorized" or "Forbidden".' })
  ])
}, { title: 'WeightsRefusal', description: 'Refused or failed.' })

export const OpenAiRefusal = Type.Object({
  error: Type.Object({
    message: Type.String(),
    type: Type.String(),
    param: Type.Union([Type.String(), Type.Null()]),
    code: Type.Union([Type.String(), Type.Null()])
  })
}, { title: 'OpenAiRefusal', description: 'Refused.' })

/** The 4xx and 5xx replies of a route, for its response schema. */
export function refusals (schema: TSchema = Refusal) {
  return { '4xx': schema, '5xx': schema }
}

/** A 200 that is JSON, or server-sent events if the request sets `stream`. */
export function streamable (schema: TSchema, description: string) {
  const events = Type.String({ description: 'Frames `data: <JSON>`, the last one `data: [DONE]`.' })
  return { description, content: { 'application/json': { schema }, 'text/event-stream': { schema: events } } }
}
