import type { Store } from './store.ts'
import type { Limits } from './deadline.ts'

/** torch's PrefixStore: the part of a store whose keys begin with `prefix` and a slash. Prefixes nest. */
export class PrefixStore implements Store {
  readonly #prefix: string
  readonly #store: Store

  constructor (prefix: string, store: Store) {
    this.#prefix = prefix
    this.#store = store
  }

  get where (): string {
    return this.#store.where
  }

  async set (key: string, value: Uint8Array | string, limits?: Limits): Promise<void> {
    await this.#store.set(this.#key(key), value, limits)
  }

  async get (key: string, limits?: Limits): Promise<Buffer> {
    return await this.#store.get(this.#key(key), limits)
  }

  async add (key: string, delta: number, limits?: Limits): Promise<number> {
    return await this.#store.add(this.#key(key), delta, limits)
  }

  async check (keys: readonly string[], limits?: Limits): Promise<boolean> {
    return await this.#store.check(this.#keys(keys), limits)
  }

  async wait (keys: readonly string[], limits?: Limits): Promise<void> {
    await this.#store.wait(this.#keys(keys), limits)
  }

  async multiGet (keys: readonly string[], limits?: Limits): Promise<Buffer[]> {
    return await this.#store.multiGet(this.#keys(keys), limits)
  }

  async compareSet (
    key: string,
    expected: Uint8Array | string,
    desired: Uint8Array | string,
    limits?: Limits
  ): Promise<Buffer> {
    return await this.#store.compareSet(this.#key(key), expected, desired, limits)
  }

  async deleteKey (key: string, limits?: Limits): Promise<boolean> {
    return await this.#store.deleteKey(this.#key(key), limits)
  }

  #key (key: string): string {
    return `${this.#prefix}/${key}`
  }

  #keys (keys: readonly string[]): string[] {
    return keys.map(key => this.#key(key))
  }
}
