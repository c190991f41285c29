import { describePickle, PickleBytes, PickleName } from '../pickle/values.ts'
import type { PickleTuple, PickleValue } from '../pickle/values.ts'
import { describeUnreadDType, torchItemBytes } from './dtypes.ts'
import { payloadError } from './tensor.ts'

// Reads fields of torch's records and checks that they hold what torch writes. All functions throw TENSOR_PAYLOAD.

/** An int in [0, 2^53). */
export function toSize (value: PickleValue | undefined, what: string): number {
  if (typeof value === 'number' && value >= 0) return value
  throw payloadError(`${what} is ${describePickle(value)}, not an int from 0 to 2^53 - 1`)
}

/** A tuple of such ints: the tuple itself, not a copy. */
export function toSizes (value: PickleValue | undefined, what: string): number[] {
  if (!Array.isArray(value)) throw payloadError(`${what} is ${describePickle(value)}, not a tuple of ints`)
  for (const size of value) {
    if (typeof size !== 'number' || size < 0) {
      throw payloadError(`${what} holds ${describePickle(size)}, not an int from 0 to 2^53 - 1`)
    }
  }
  return value as number[]
}

export function toBoolean (value: PickleValue | undefined, what: string): boolean {
  if (typeof value === 'boolean') return value
  throw payloadError(`${what} is ${describePickle(value)}, not True or False`)
}

export function toBytes (value: PickleValue | undefined, what: string): PickleBytes {
  if (value instanceof PickleBytes) return value
  throw payloadError(`${what} is ${describePickle(value)}, not bytes`)
}

/** The torch name of a dtype that payloads may carry. */
export function toTorchDType (value: PickleValue | undefined): string {
  if (!(value instanceof PickleName) || value.role !== 'dtype') {
    throw payloadError(`its dtype is ${describePickle(value)}, not one of torch's`)
  }
  if (torchItemBytes(value.name) === undefined) throw payloadError(describeUnreadDType(value.name))
  return value.name
}

export function checkRole (value: PickleValue | undefined, what: string, role: string, other = role): void {
  if (value instanceof PickleName && (value.role === role || value.role === other)) return
  throw payloadError(`${what} is ${describePickle(value)}, not one that refit knows`)
}

export function checkCount (args: PickleTuple, what: string, count: number, other = count): void {
  if (args.length === count || args.length === other) return
  throw payloadError(
    `${what} has ${args.length} arguments; torch writes ${count}${other === count ? '' : ` or ${other}`}`
  )
}
