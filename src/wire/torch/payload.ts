import { RefitError } from '../../errors.ts'
import { readPickle } from '../pickle/read.ts'
import type { PickleNames } from '../pickle/read.ts'
import type { PickleLimits } from '../../native/pickle.ts'
import { malformed } from '../pickle/error.ts'
import type { PickleValue } from '../pickle/values.ts'
import { torchNames } from './names.ts'

// The output of MultiprocessingSerializer.serialize: a pickle, or base64 of one.

const PROTO = 0x80
const HIGHEST_PROTOCOL = 5
/** A tensor's handle takes less than a kilobyte; that of a very long expandable segment takes some tens. */
const NESTED_LIMITS: PickleLimits = {
  bytes: 2 ** 20,
  memo: 4096,
  objects: 4096,
  items: 16384,
  stack: 4096,
  depth: 16,
  text: 2 ** 16
}

/**
 * Reads one entry. Like SGLang's server, it accepts bytes or text, and base64 of base64. Throws PICKLE_*. Bytes of the
 * result are views.
 */
export function readPayload (entry: string | Uint8Array, names: PickleNames = torchNames): PickleValue {
  return readPickle(decodePayload(entry), names)
}

/** The pickle of an entry. Throws PICKLE_MALFORMED. */
export function decodePayload (entry: string | Uint8Array): Uint8Array {
  let bytes = typeof entry === 'string' ? decodeBase64(entry) : entry
  for (let layers = 0; layers < 2 && !isPickle(bytes) && looksLikeText(bytes); layers++) {
    bytes = decodeBase64(Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength).toString('latin1'))
  }
  return bytes
}

/** Reads the pickle of one tensor that another pickle holds as bytes. Throws PICKLE_*. */
export function readNested (bytes: Uint8Array, names: PickleNames = torchNames): PickleValue {
  return readPickle(bytes, names, NESTED_LIMITS)
}

/** Standard base64: the strict alphabet, with padding and without line breaks. */
export function decodeBase64 (text: string): Buffer {
  const padding = text.endsWith('==') ? 2 : text.endsWith('=') ? 1 : 0
  const bytes = Buffer.from(text, 'base64')
  // Buffer skips bytes that are not base64 and accepts the URL alphabet too; these checks find both.
  if (
    text.length % 4 !== 0 || bytes.length !== text.length / 4 * 3 - padding || text.includes('-') || text.includes('_')
  ) {
    throw malformed('it is not base64 (the standard alphabet, padded, without line breaks)', 0)
  }
  return bytes
}

function isPickle (bytes: Uint8Array): boolean {
  return bytes[0] === PROTO && bytes.length > 1 && bytes[1]! <= HIGHEST_PROTOCOL
}

/** Base64 of a pickle begins with `g`, and base64 of that with `Z`. */
function looksLikeText (bytes: Uint8Array): boolean {
  return bytes[0] === 0x67 || bytes[0] === 0x5a
}

/** Adds the name of the entry to an error. */
export function inEntry<T> (where: string, read: () => T): T {
  try {
    return read()
  } catch (error) {
    if (!(error instanceof RefitError)) throw error
    throw new RefitError(
      error.code,
      `${where}: ${error.message}`,
      error.param === undefined ? {} : { param: error.param }
    )
  }
}
