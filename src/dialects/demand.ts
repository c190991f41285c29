import { RefitError } from '../errors.ts'

/** What a check of an object inside a body has found; else throws what it says, with the object's name before it. */
export function demand<T> (checked: { value: unknown } | { error: Error }, name: string): T {
  if ('value' in checked) return checked.value as T
  const { code, message, param } = checked.error as RefitError
  throw new RefitError(code, `${name}: ${message}`, param === undefined ? {} : { param })
}
