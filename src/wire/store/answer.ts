import { i64, sized, u32 } from './fields.ts'
import { NOT_READY, READY } from './protocol.ts'

// Replies as a server writes them.

export function numberAnswer (value: number): Buffer {
  return i64(value)
}

export function valueAnswer (value: Uint8Array): Buffer {
  return Buffer.concat(sized(value))
}

export function valuesAnswer (values: readonly Uint8Array[]): Buffer {
  return Buffer.concat(values.flatMap(sized))
}

export function checkAnswer (there: boolean): Buffer {
  return Buffer.of(there ? READY : NOT_READY)
}

export function byteAnswer (byte: number): Buffer {
  return Buffer.of(byte)
}

export function pingAnswer (nonce: number): Buffer {
  return u32(nonce)
}

/** `keys` are as on the wire. */
export function keysAnswer (keys: readonly string[]): Buffer {
  return Buffer.concat([i64(keys.length), ...keys.flatMap(key => sized(Buffer.from(key, 'latin1')))])
}
