import { newBudget, readCount, readI64, readKey, readKeys, readValue } from './fields.ts'
import { MAGIC, OPCODES, protocolError, STORE_LIMITS } from './protocol.ts'
import type { Pull } from './pull.ts'
import type { StoreRequest } from './request.ts'

/** The first request of every connection. Throws STORE_PROTOCOL at the first byte of anything else. */
export function* readHandshake (): Pull<StoreRequest> {
  const opcode = (yield 1)[0]!
  if (opcode !== OPCODES.VALIDATE) throw protocolError(`opcode ${opcode} before the handshake`)
  const magic = (yield 4).readUInt32LE()
  if (magic !== MAGIC) {
    throw protocolError(
      `a handshake of 0x${magic.toString(16)}, which is not that of a TCPStore (0x${MAGIC.toString(16)})`
    )
  }
  return { op: 'VALIDATE', magic }
}

/**
 * One request after the handshake, as a server reads it. Throws STORE_PROTOCOL if the server must close the connection.
 */
export function* readRequest (): Pull<StoreRequest> {
  const opcode = (yield 1)[0]!
  const left = newBudget()
  switch (opcode) {
    case OPCODES.SET:
      return { op: 'SET', key: yield* readKey(left), value: yield* readValue(left) }
    case OPCODES.COMPARE_SET:
      return {
        op: 'COMPARE_SET',
        key: yield* readKey(left),
        expected: yield* readValue(left),
        desired: yield* readValue(left)
      }
    case OPCODES.GET:
      return { op: 'GET', key: yield* readKey(left) }
    case OPCODES.ADD:
      return { op: 'ADD', key: yield* readKey(left), delta: yield* readI64() }
    case OPCODES.CHECK:
      return { op: 'CHECK', keys: yield* readKeys(left) }
    case OPCODES.WAIT:
      return { op: 'WAIT', keys: yield* readKeys(left) }
    case OPCODES.NUM_KEYS:
      return { op: 'NUM_KEYS' }
    case OPCODES.DELETE_KEY:
      return { op: 'DELETE_KEY', key: yield* readKey(left) }
    case OPCODES.APPEND:
      return { op: 'APPEND', key: yield* readKey(left), value: yield* readValue(left) }
    case OPCODES.MULTI_GET:
      return { op: 'MULTI_GET', keys: yield* readKeys(left) }
    case OPCODES.MULTI_SET: {
      const count = yield* readCount(STORE_LIMITS.keys, 'a number of keys')
      const pairs: Array<[string, Uint8Array]> = []
      for (let i = 0; i < count; i++) pairs.push([yield* readKey(left), yield* readValue(left)])
      return { op: 'MULTI_SET', pairs }
    }
    case OPCODES.CANCEL_WAIT:
      return { op: 'CANCEL_WAIT' }
    case OPCODES.PING:
      return { op: 'PING', nonce: (yield 4).readUInt32LE() }
    case OPCODES.LIST_KEYS:
      return { op: 'LIST_KEYS' }
    default:
      throw protocolError(`opcode ${opcode} is not known`)
  }
}
