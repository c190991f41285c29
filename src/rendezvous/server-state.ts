import { protocolError, STORE_LIMITS, WORKERS_KEY } from '../wire/store/protocol.ts'

/** The cost of a key in addition to its bytes. */
const KEY_COST = 128
const NOTHING = Buffer.alloc(0)

/**
 * The keys of a store and the clients that wait for them. Keys are as on the wire, one character per byte. Throws
 * STORE_PROTOCOL if torch's server would close the connection, and beyond the limits.
 */
export class StoreState {
  readonly #maxKeys: number
  readonly #maxBytes: number
  readonly #values = new Map<string, Buffer>()
  /** Each waiter is listed under the first of its keys that is missing. */
  readonly #waiters = new Map<string, Set<() => void>>()
  readonly #counted: () => void
  #bytes = 0

  /** `counted` is called whenever ranks have been counted. */
  constructor (limits: { maxKeys: number, maxBytes: number }, counted: () => void = () => {}) {
    this.#counted = counted
    this.#maxKeys = limits.maxKeys
    this.#maxBytes = limits.maxBytes
  }

  get size (): number {
    return this.#values.size
  }

  get keys (): string[] {
    return [...this.#values.keys()]
  }

  /** The number of ranks that have been counted. */
  get workers (): number {
    return Number(this.get(WORKERS_KEY).toString())
  }

  /** The number of waiters. */
  get waiting (): number {
    return [...this.#waiters.values()].reduce((sum, there) => sum + there.size, 0)
  }

  /** Empty if the key is missing. */
  get (key: string): Buffer {
    return this.#values.get(key) ?? NOTHING
  }

  has (keys: readonly string[]): boolean {
    return keys.every(key => this.#values.has(key))
  }

  set (key: string, value: Uint8Array): void {
    const old = this.#values.get(key)
    const bytes = this.#bytes + value.length - (old?.length ?? -key.length - KEY_COST)
    if (value.length > STORE_LIMITS.valueBytes) {
      throw protocolError(`a value of ${value.length} bytes: at most ${STORE_LIMITS.valueBytes} are taken`)
    }
    if (old === undefined && this.#values.size >= this.#maxKeys) {
      throw protocolError(`the store holds ${this.#maxKeys} keys, which is its limit`)
    }
    if (bytes > this.#maxBytes) {
      throw protocolError(`the store would hold ${bytes} bytes; its limit is ${this.#maxBytes}`)
    }
    this.#bytes = bytes
    this.#values.set(key, Buffer.from(value))
    this.#wake(key)
    if (key === WORKERS_KEY) this.#counted()
  }

  append (key: string, value: Uint8Array): void {
    this.set(key, Buffer.concat([this.get(key), value]))
  }

  add (key: string, delta: number): number {
    const text = this.#values.get(key)?.toString() ?? '0'
    const sum = Number(text) + delta
    if (!/^-?\d+$/.test(text) || !Number.isSafeInteger(sum)) {
      throw protocolError('ADD to what is no number, or grows out of range')
    }
    this.set(key, Buffer.from(String(sum)))
    return sum
  }

  compareSet (key: string, expected: Uint8Array, desired: Uint8Array): Uint8Array {
    const held = this.#values.get(key)
    if (held === undefined ? expected.length > 0 : !held.equals(expected)) return held ?? expected
    this.set(key, desired)
    return desired
  }

  delete (key: string): boolean {
    const held = this.#values.get(key)
    if (held === undefined) return false
    this.#bytes -= held.length + key.length + KEY_COST
    return this.#values.delete(key)
  }

  /** Calls `ready` once every key has existed, perhaps before this returns. The returned function cancels the wait. */
  wait (keys: readonly string[], ready: () => void): () => void {
    let next = 0
    const go = (): void => {
      while (next < keys.length && this.#values.has(keys[next]!)) next++
      if (next === keys.length) {
        ready()
        return
      }
      const there = this.#waiters.get(keys[next]!) ?? new Set()
      this.#waiters.set(keys[next]!, there.add(go))
    }
    go()
    return () => {
      const there = this.#waiters.get(keys[next] ?? '')
      if (there?.delete(go) === true && there.size === 0) this.#waiters.delete(keys[next]!)
    }
  }

  #wake (key: string): void {
    const there = this.#waiters.get(key)
    if (there === undefined) return
    this.#waiters.delete(key)
    for (const go of there) go()
  }
}
