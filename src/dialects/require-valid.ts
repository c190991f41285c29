import { RefitError } from '../errors.ts'

/** The value that a schema check of a nested object returned; throws its error with the object's name in front. */
export function requireValid<T> (checked: { value: unknown } | { error: Error }, name: string): T {
  if ('value' in checked) return checked.value as T
  const { code, message, param } = checked.error as RefitError
  throw new RefitError(code, `${name}: ${message}`, param === undefined ? {} : { param })
}
