import { newBudget, readCount, readI64, readKey, readValue } from './fields.ts'
import { NOT_READY, protocolError, READY, STOP_WAITING, STORE_LIMITS, WAIT_CANCELED } from './protocol.ts'
import type { Pull } from './pull.ts'

// Replies as a client reads them. The request determines the type of its reply. Throws STORE_PROTOCOL.

export function numberReply (): Pull<number> {
  return readI64()
}

export function valueReply (limit: number = STORE_LIMITS.valueBytes): Pull<Buffer> {
  return readValue(newBudget(), limit)
}

/** The reply to MULTI_GET of `count` keys. */
export function* valuesReply (count: number, limit: number = STORE_LIMITS.valueBytes): Pull<Buffer[]> {
  const left = newBudget()
  const values: Buffer[] = []
  for (let i = 0; i < count; i++) values.push(yield* readValue(left, limit))
  return values
}

/** The reply to CHECK: true if all keys exist. */
export function* checkReply (): Pull<boolean> {
  const byte = (yield 1)[0]!
  if (byte !== READY && byte !== NOT_READY) {
    throw protocolError(`${byte} as the answer to CHECK, which is ${READY} or ${NOT_READY}`)
  }
  return byte === READY
}

/**
 * The reply to WAIT: true when the keys exist, false when the wait was cancelled. `isCanceled` returns true once
 * CANCEL_WAIT has been sent: its reply always arrives, also after the reply to a wait that ended just before.
 */
export function* waitReply (isCanceled: () => boolean): Pull<boolean> {
  const byte = (yield 1)[0]!
  if (byte === WAIT_CANCELED && isCanceled()) return false
  if (byte !== STOP_WAITING) throw protocolError(`${byte} as the answer to WAIT, which is ${STOP_WAITING}`)
  if (isCanceled()) {
    const second = (yield 1)[0]!
    if (second !== WAIT_CANCELED) {
      throw protocolError(`${second} as the answer to CANCEL_WAIT, which is ${WAIT_CANCELED}`)
    }
  }
  return true
}

export function* pingReply (nonce: number): Pull<void> {
  const echo = (yield 4).readUInt32LE()
  if (echo !== nonce) throw protocolError(`${echo} as the answer to PING of ${nonce}`)
}

/** The reply to LIST_KEYS, as keys on the wire. */
export function* keysReply (): Pull<string[]> {
  const left = newBudget()
  const count = yield* readCount(STORE_LIMITS.keys, 'a number of keys')
  const keys: string[] = []
  for (let i = 0; i < count; i++) keys.push(yield* readKey(left))
  return keys
}
