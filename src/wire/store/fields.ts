import { protocolError, STORE_LIMITS } from './protocol.ts'
import type { Pull } from './pull.ts'

// The fields that requests and replies are made of.

/** Bytes that one message may still take. */
export interface Budget {
  left: number
}

export function newBudget (): Budget {
  return { left: STORE_LIMITS.messageBytes }
}

export function i64 (value: number): Buffer {
  const bytes = Buffer.alloc(8)
  bytes.writeBigInt64LE(BigInt(value))
  return bytes
}

export function u32 (value: number): Buffer {
  const bytes = Buffer.alloc(4)
  bytes.writeUInt32LE(value)
  return bytes
}

/** A length, then the bytes. */
export function sized (value: Uint8Array): Uint8Array[] {
  return [i64(value.length), value]
}

export function* readI64 (): Pull<number> {
  const value = (yield 8).readBigInt64LE()
  const number = Number(value)
  if (!Number.isSafeInteger(number)) throw protocolError(`the number ${value} is out of the range that refit counts in`)
  return number
}

/** A length or count of at most `limit`. `what` names it in the error. */
export function* readCount (limit: number, what: string): Pull<number> {
  const value = (yield 8).readBigUInt64LE()
  if (value > BigInt(limit)) throw protocolError(`${what} of ${value}: at most ${limit} is taken`)
  return Number(value)
}

/** A copy, so that the memory of the whole message can be freed. */
export function* readValue (left: Budget, limit: number = STORE_LIMITS.valueBytes): Pull<Buffer> {
  const length = yield* readCount(Math.min(limit, left.left), "a value's length")
  left.left -= length
  return length === 0 ? Buffer.alloc(0) : Buffer.from(yield length)
}

/**
 * One character a byte (latin1), so that different keys stay different even if they are not UTF-8; `keyText` decodes
 * one.
 */
export function* readKey (left: Budget): Pull<string> {
  const length = yield* readCount(Math.min(STORE_LIMITS.keyBytes, left.left), "a key's length")
  left.left -= length
  return length === 0 ? '' : (yield length).toString('latin1')
}

export function* readKeys (left: Budget): Pull<string[]> {
  const count = yield* readCount(STORE_LIMITS.keys, 'a number of keys')
  const keys: string[] = []
  for (let i = 0; i < count; i++) keys.push(yield* readKey(left))
  return keys
}

/** The text of a key that came as bytes. */
export function keyText (key: string): string {
  return Buffer.from(key, 'latin1').toString()
}

/** The reverse of `keyText`. */
export function keyBytes (key: string): string {
  return Buffer.from(key).toString('latin1')
}
