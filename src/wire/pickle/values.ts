// The inert values that a pickle is read into. Python's None, bool, int and str become null, boolean, number or bigint,
// and string; a tuple becomes an array. A value refers only to other values and to the bytes that were read.

export type PickleValue =
  | null
  | boolean
  | number
  | bigint
  | string
  | PickleTuple
  | PickleFloat
  | PickleBytes
  | PickleList
  | PickleDict
  | PickleSet
  | PickleName
  | PickleObject

export type PickleTuple = PickleValue[]

/**
 * How a name of the closed set may be used. `value`: it stands for itself (a class or dtype as an argument). `call`: it
 * has arguments (REDUCE) and becomes a PickleObject. `class`: an instance with state (NEWOBJ, BUILD), also a
 * PickleObject. The others are Python's own ways to write plain values and are read as those values: `tuple` (a
 * subclass of tuple around a tuple), `dict`, `set`, `bytes`, and `latin1` (bytes as text, as protocol 2 writes them).
 * `any`: all of these, as a record that keeps any arguments; it serves only to search a refused pickle for handles.
 */
export type PickleUse = 'value' | 'call' | 'class' | 'tuple' | 'dict' | 'set' | 'bytes' | 'latin1' | 'any'

/** A global name of the closed set. Readers switch on `role`, because several modules have names for one function. */
export class PickleName {
  readonly module: string
  readonly name: string
  readonly use: PickleUse
  readonly role: string

  constructor (module: string, name: string, use: PickleUse, role: string) {
    this.module = module
    this.name = name
    this.use = use
    this.role = role
  }
}

/** A call that was not made, or an instance that was not built: the name and its arguments. */
export class PickleObject {
  readonly name: PickleName
  args: PickleTuple
  /** The dict that BUILD gave an instance of a class. */
  state: PickleDict | null = null
  /** The result that a reader made of this object. An object that occurs in several places gives one result. */
  seen: unknown = undefined

  constructor (name: PickleName, args: PickleTuple = []) {
    this.name = name
    this.args = args
  }
}

/** Bytes of the pickle, not copied. */
export class PickleBytes {
  readonly buffer: Buffer
  readonly start: number
  readonly end: number

  constructor (buffer: Buffer, start: number, end: number) {
    this.buffer = buffer
    this.start = start
    this.end = end
  }

  get length (): number {
    return this.end - this.start
  }

  /** A view of the same memory. */
  view (): Buffer {
    return this.buffer.subarray(this.start, this.end)
  }

  equals (other: PickleBytes): boolean {
    const { buffer, start, end } = this
    if (other.end - other.start !== end - start) return false
    if (other === this) return true
    const shift = other.start - start
    for (let at = start; at < end; at++) if (buffer[at] !== other.buffer[at + shift]) return false
    return true
  }

  /** One character per byte. */
  latin1 (): string {
    return this.buffer.toString('latin1', this.start, this.end)
  }
}

/** A class of its own, because Python takes no float in a shape. */
export class PickleFloat {
  readonly value: number

  constructor (value: number) {
    this.value = value
  }
}

export class PickleList {
  items: PickleValue[] = []
}

export class PickleSet {
  items: PickleValue[] = []
}

const MAX_FIELDS = 256

/** Entries in the order of the pickle. A key may appear twice. */
export class PickleDict {
  readonly keys: PickleValue[] = []
  readonly values: PickleValue[] = []

  get size (): number {
    return this.keys.length
  }

  /**
   * The last value under a text key. A dict with more entries than MAX_FIELDS is no record of fields and gives
   * undefined: thousands of records may have one such dict.
   */
  get (key: string): PickleValue | undefined {
    return this.keys.length > MAX_FIELDS ? undefined : this.values[this.keys.lastIndexOf(key)]
  }
}

/** A short description of a value for a message, without its contents. */
export function describePickle (value: PickleValue | undefined): string {
  if (value === undefined) return 'nothing'
  if (value === null) return 'None'
  if (typeof value === 'boolean') return value ? 'True' : 'False'
  if (typeof value === 'string') return 'a str'
  if (typeof value === 'number' || typeof value === 'bigint') return `the int ${String(value).slice(0, 24)}`
  if (Array.isArray(value)) return `a tuple of ${value.length}`
  if (value instanceof PickleList) return `a list of ${value.items.length}`
  if (value instanceof PickleDict) return `a dict of ${value.size}`
  if (value instanceof PickleSet) return `a set of ${value.items.length}`
  if (value instanceof PickleBytes) return `${value.length} bytes`
  if (value instanceof PickleFloat) return `the float ${value.value}`
  return value instanceof PickleName ? value.name : `a ${value.name.name}`
}
