import { RefitError } from '../errors.ts'

/** The error of a grammar that cannot be compiled. `kind` is the kind of grammar. */
export function refusal (kind: string, message: string): RefitError {
  return new RefitError('INVALID_REQUEST', `${kind}: ${message}`, { param: kind })
}

/** At most 80 characters of a request's text, for messages. */
export function excerpt (text: string): string {
  return JSON.stringify(text.length <= 80 ? text : `${text.slice(0, 77)}...`)
}
