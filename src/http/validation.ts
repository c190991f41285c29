import { Ajv, type ValidateFunction } from 'ajv'
import type { FastifySchemaCompiler } from 'fastify'
import type { TSchema } from 'typebox'
import { RefitError } from '../errors.ts'
import { coerceLax } from './lax.ts'
import { ACCEPTED, REFUSED } from './schemas.ts'
import { explain } from './validation-message.ts'

type Check = (data: unknown) => { value: unknown } | { error: Error }

const options = {
  strict: true,
  strictTypes: false,
  allowUnionTypes: true,
  verbose: true,
  // The schemas are constants. To compile the schema of schemas takes 50 ms of the first request.
  meta: false,
  validateSchema: false,
  removeAdditional: false,
  useDefaults: true
} as const
const bodies = new Ajv({ ...options, coerceTypes: false })
// Query strings and path parameters are strings until something converts them.
const strings = new Ajv({ ...options, coerceTypes: 'array' })
for (const ajv of [bodies, strings]) ajv.addVocabulary([ACCEPTED, REFUSED])

/**
 * Validators of refit's own scope: a host's validators would turn "3" into 3 and drop fields that they do not know.
 * Bodies whose schema forbids unknown fields are taken unchanged; others get pydantic's leniency towards numeric
 * strings.
 */
export const validatorCompiler: FastifySchemaCompiler<TSchema> = ({ schema, httpPart }) => {
  return httpPart === 'body' ? bodyCheck(schema) : stringCheck(schema, httpPart ?? 'query')
}

/** Checks a JSON body against a schema; also used for bodies that arrive on a GET. */
export function bodyCheck (schema: TSchema): Check {
  const compiled = once(() => bodies.compile(schema))
  const strict = (schema as { additionalProperties?: unknown }).additionalProperties === false
  return data => {
    const value = strict ? data : coerceLax(schema, data)
    const validate = compiled()
    return validate(value) ? { value } : { error: invalid(validate.errors!, 'body') }
  }
}

function stringCheck (schema: TSchema, part: string): Check {
  const compiled = once(() => strings.compile(schema))
  return data => {
    const validate = compiled()
    return validate(data) ? { value: data } : { error: invalid(validate.errors!, part) }
  }
}

/** Compiles a schema at its first check: of the many routes a server uses few, and their schemas delay its start. */
function once (compile: () => ValidateFunction): () => ValidateFunction {
  let compiled: ValidateFunction | undefined
  return () => {
    compiled ??= compile()
    return compiled
  }
}

function invalid (errors: Parameters<typeof explain>[0], part: string): RefitError {
  const { param, message } = explain(errors, part)
  return new RefitError('INVALID_REQUEST', message, { param })
}
