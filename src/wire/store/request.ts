import { RefitError } from '../../errors.ts'
import { i64, sized, u32 } from './fields.ts'
import { MAGIC, OPCODES, STORE_LIMITS } from './protocol.ts'

// Requests as a client writes them. Keys are as on the wire, one character a byte.

export type StoreRequest =
  | { op: 'VALIDATE', magic: number }
  | { op: 'SET', key: string, value: Uint8Array }
  | { op: 'COMPARE_SET', key: string, expected: Uint8Array, desired: Uint8Array }
  | { op: 'GET', key: string }
  | { op: 'ADD', key: string, delta: number }
  | { op: 'CHECK', keys: readonly string[] }
  | { op: 'WAIT', keys: readonly string[] }
  | { op: 'NUM_KEYS' }
  | { op: 'DELETE_KEY', key: string }
  | { op: 'APPEND', key: string, value: Uint8Array }
  | { op: 'MULTI_GET', keys: readonly string[] }
  | { op: 'MULTI_SET', pairs: Array<[key: string, value: Uint8Array]> }
  | { op: 'CANCEL_WAIT' }
  | { op: 'PING', nonce: number }
  | { op: 'LIST_KEYS' }

/** One buffer, because a server that reads for all clients on one thread must not wait for the rest of a request. */
export function encodeRequests (...requests: StoreRequest[]): Buffer {
  return Buffer.concat(requests.flatMap(request => [Buffer.of(OPCODES[request.op]), ...fields(request)]))
}

function fields (request: StoreRequest): Uint8Array[] {
  switch (request.op) {
    case 'VALIDATE':
      return [u32(request.magic)]
    case 'SET':
    case 'APPEND':
      return [...key(request.key), ...value(request.value)]
    case 'COMPARE_SET':
      return [...key(request.key), ...value(request.expected), ...value(request.desired)]
    case 'GET':
    case 'DELETE_KEY':
      return key(request.key)
    case 'ADD':
      return [...key(request.key), i64(request.delta)]
    case 'CHECK':
    case 'WAIT':
    case 'MULTI_GET':
      return keys(request.keys)
    case 'MULTI_SET':
      return [
        ...count(request.pairs.length),
        ...request.pairs.flatMap(([name, bytes]) => [...key(name), ...value(bytes)])
      ]
    case 'PING':
      return [u32(request.nonce)]
    case 'NUM_KEYS':
    case 'CANCEL_WAIT':
    case 'LIST_KEYS':
      return []
  }
}

export function validate (): StoreRequest {
  return { op: 'VALIDATE', magic: MAGIC }
}

/** Throws INVALID_REQUEST for a key on which a server would close the connection. */
function key (name: string): Uint8Array[] {
  const bytes = Buffer.from(name, 'latin1')
  return sized(within(bytes, STORE_LIMITS.keyBytes, `the key ${JSON.stringify(name.slice(0, 64))}`))
}

function value (bytes: Uint8Array): Uint8Array[] {
  return sized(within(bytes, STORE_LIMITS.valueBytes, 'a value'))
}

function keys (names: readonly string[]): Uint8Array[] {
  return [...count(names.length), ...names.flatMap(key)]
}

function count (number: number): Uint8Array[] {
  if (number > STORE_LIMITS.keys) {
    throw new RefitError(
      'INVALID_REQUEST',
      `${number} keys in one request to a store; at most ${STORE_LIMITS.keys} are taken`
    )
  }
  return [i64(number)]
}

function within (bytes: Uint8Array, limit: number, what: string): Uint8Array {
  if (bytes.length > limit) {
    throw new RefitError('INVALID_REQUEST', `${what} of ${bytes.length} bytes for a store; at most ${limit} are taken`)
  }
  return bytes
}
