import { native } from '../../native/load-addon.ts'
import { PICKLE_TYPES, PICKLE_USES } from '../../native/pickle.ts'
import type { PickleFailure, PickleLimits, PickleTree } from '../../native/pickle.ts'
import { limited, malformed, refused } from './error.ts'
import { PickleBytes, PickleDict, PickleFloat, PickleList, PickleName, PickleObject, PickleSet } from './values.ts'
import type { PickleTuple, PickleValue } from './values.ts'
import { clip } from '../strict-json.ts'

// The addon reads the opcodes (native/codec/pickle_machine.h) into tables of numbers; this builds values from them. The
// addon checks that every index is in range and that a tuple holds only objects of lower rows.

/** The closed set. Returns a name of the set, the reason why a known name is refused, or undefined. */
export type PickleNames = (module: string, name: string) => PickleName | string | undefined

const MAX_NAME = 256
const ROW = 4
const NONE = -1
const ERRORS = [malformed, refused, limited] as const

/**
 * Reads one whole pickle. Throws PICKLE_MALFORMED, PICKLE_REFUSED or PICKLE_LIMIT. Bytes of the result are views of
 * `bytes`.
 */
export function readPickle (bytes: Uint8Array, names: PickleNames, limits?: PickleLimits): PickleValue {
  const found: PickleName[] = []
  const read = native().readPickle(bytes, (module, name) => {
    const meaning = names(module, name)
    if (!(meaning instanceof PickleName)) return describeRefused(module, name, meaning)
    found.push(meaning)
    return PICKLE_USES.indexOf(meaning.use)
  }, limits)
  if (isFailure(read)) throw ERRORS[read.kind](read.message, read.at)
  return new TreeBuilder(read, Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength), found).build()
}

function isFailure (read: PickleTree | PickleFailure): read is PickleFailure {
  return 'message' in read
}

function describeRefused (module: string, name: string, reason: string | undefined): string {
  const spelled = clip(`${clip(module, MAX_NAME)}.${clip(name, MAX_NAME)}`, 2 * MAX_NAME)
  return `${JSON.stringify(spelled)} ${
    reason === undefined ? 'is not a name that refit knows' : `is not taken: ${reason}`
  }`
}

class TreeBuilder {
  readonly #rows: Int32Array
  readonly #values: Int32Array
  readonly #encoded: Buffer
  readonly #bytes: Buffer
  readonly #names: readonly PickleName[]
  readonly #built: PickleValue[]

  constructor ({ objects, values, encoded }: PickleTree, bytes: Buffer, names: readonly PickleName[]) {
    this.#rows = objects
    this.#values = values
    this.#encoded = Buffer.from(encoded.buffer)
    this.#bytes = bytes
    this.#names = names
    this.#built = new Array<PickleValue>(objects.length / ROW)
  }

  build (): PickleValue {
    const count = this.#built.length
    for (let index = 0; index < count; index++) this.#built[index] = this.#make(index * ROW)
    // Lists, dicts, sets and calls may hold objects of any row.
    for (let index = 0; index < count; index++) this.#fill(index * ROW, this.#built[index]!)
    return this.#value(this.#values.length / 2 - 1)
  }

  #make (row: number): PickleValue {
    const at = this.#rows[row + 1]!
    const end = at + this.#rows[row + 2]!
    switch (this.#rows[row]) {
      case PICKLE_TYPES.text:
        return this.#bytes.toString(this.#rows[row + 3] === 1 ? 'latin1' : 'utf8', at, end)
      case PICKLE_TYPES.bytes:
        return new PickleBytes(this.#bytes, at, end)
      case PICKLE_TYPES.encoded:
        return new PickleBytes(this.#encoded, at, end)
      case PICKLE_TYPES.float:
        return new PickleFloat(this.#bytes.readDoubleBE(at))
      case PICKLE_TYPES.tuple:
        return this.#items(at, end)
      case PICKLE_TYPES.dict:
        return new PickleDict()
      case PICKLE_TYPES.set:
        return new PickleSet()
      case PICKLE_TYPES.call:
        return new PickleObject(this.#names[at]!)
      default:
        return new PickleList()
    }
  }

  #fill (row: number, value: PickleValue): void {
    const at = this.#rows[row + 1]!
    const size = this.#rows[row + 2]!
    const more = this.#rows[row + 3]!
    switch (this.#rows[row]) {
      case PICKLE_TYPES.list:
        ;(value as PickleList).items = this.#items(at, at + size)
        break
      case PICKLE_TYPES.set:
        ;(value as PickleSet).items = more === NONE
          ? this.#items(at, at + size)
          : (this.#built[more] as PickleList).items
        break
      case PICKLE_TYPES.dict:
        for (let index = at; index < at + size; index += 2) {
          ;(value as PickleDict).keys.push(this.#value(index))
          ;(value as PickleDict).values.push(this.#value(index + 1))
        }
        break
      case PICKLE_TYPES.call: {
        // The arguments of a record that keeps any arguments are a list of a lower row, which is complete already.
        const args = this.#built[size]!
        ;(value as PickleObject).args = args instanceof PickleList ? args.items : args as PickleTuple
        if (more !== NONE) (value as PickleObject).state = this.#built[more] as PickleDict
      }
    }
  }

  #items (from: number, to: number): PickleValue[] {
    const items = new Array<PickleValue>(to - from)
    for (let index = from; index < to; index++) items[index - from] = this.#value(index)
    return items
  }

  #value (index: number): PickleValue {
    const low = this.#values[2 * index]!
    const high = this.#values[2 * index + 1]!
    // 56 bits: 32 in `high`, then the upper 24 of `low`.
    const payload = high * 0x100_0000 + (low >>> 8)
    switch (low & 0xff) {
      case PICKLE_TYPES.none:
        return null
      case PICKLE_TYPES.bool:
        return payload === 1
      case PICKLE_TYPES.int:
        return payload
      case PICKLE_TYPES.long:
        return this.#long(Math.floor(payload / 256), payload % 256)
      case PICKLE_TYPES.name:
        return this.#names[payload]!
      default:
        return this.#built[payload]!
    }
  }

  /** Two's complement, little-endian. A number if a number holds it exactly, else a bigint. */
  #long (at: number, length: number): number | bigint {
    let value = BigInt(this.#bytes.readInt8(at + length - 1))
    for (let i = length - 2; i >= 0; i--) value = value * 256n + BigInt(this.#bytes[at + i]!)
    const small = Number(value)
    return Number.isSafeInteger(small) ? small : value
  }
}
