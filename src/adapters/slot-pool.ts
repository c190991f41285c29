import { RefitError } from '../errors.ts'
import type { AdapterVersion } from './adapter-version.ts'
import type { SlotMemory } from './slot-memory.ts'

/** A request that waits this long for a slot holds back later requests for adapters that have one. */
const PATIENCE_MS = 2000
const LONGEST_TIMER_MS = 2 ** 31 - 1

export interface SlotPoolOptions {
  slots: number
  /** Slots that requests may use at a time. */
  limit: number
  /** See AdapterStoreOptions. */
  settle: () => Promise<void>
  deadlineMs: number
}

/**
 * Slots and the versions in them. Versions that no request uses leave for host memory when others need their slots,
 * the least recently used first. One slot more than `limit` exists, for a version that is loaded while all others are
 * in use.
 */
export class SlotPool {
  readonly #memory: SlotMemory
  readonly #limit: number
  readonly #deadlineMs: number
  readonly #slots: (AdapterVersion | 'taken' | null)[]
  readonly #settle: () => Promise<void>
  /** Slots that a step under way may still use, for a request that has ended. */
  readonly #unsettled = new Set<number>()
  /** Called at every change of any slot. */
  readonly #listeners = new Set<() => void>()
  /** When the restores under way began. */
  readonly #began = new Set<{ at: number }>()
  readonly #restores = new Map<AdapterVersion, Promise<void>>()
  #uses = 0

  constructor (memory: SlotMemory, { slots, limit, settle, deadlineMs }: SlotPoolOptions) {
    this.#memory = memory
    this.#settle = settle
    this.#limit = limit
    this.#deadlineMs = deadlineMs
    this.#slots = Array.from({ length: slots }, () => null)
  }

  /** Versions that are in slots. */
  get residents (): AdapterVersion[] {
    return this.#slots.filter((held): held is AdapterVersion => held !== null && held !== 'taken')
  }

  /**
   * Takes a version for a request, bringing it into a slot first if it has none. Throws the signal's reason. Leave it
   * with `leave`.
   */
  async enter (version: AdapterVersion, signal?: AbortSignal): Promise<number> {
    const arrived = performance.now()
    version.waiting++
    try {
      while (version.slot === null || this.#isHeldBack(version, arrived)) {
        signal?.throwIfAborted()
        if (version.slot === null) await this.#restore(version, signal)
        else await this.#change(Infinity, signal)
      }
      signal?.throwIfAborted()
      version.users++
      version.usedAt = ++this.#uses
      return version.slot
    } finally {
      version.waiting--
      if (version.users > 0 || version.waiting === 0) version.isAwaited = false
      if (version.requests === 0) this.#leftBy(version)
    }
  }

  /** A step under way may still have the request. */
  leave (version: AdapterVersion): void {
    version.users--
    if (version.slot !== null) this.#unsettled.add(version.slot)
    if (version.requests === 0) this.#leftBy(version)
    else this.#wake()
  }

  /** A version without a name goes when its last request has left it. */
  retire (version: AdapterVersion): void {
    version.isRetired = true
    version.pinned = false
    if (version.requests === 0) this.#leftBy(version)
  }

  /**
   * An empty slot, which stays taken until `put` or `giveBack`. Moves a version that no request uses to host memory if
   * none is empty; waits if all are in use. DEADLINE if that takes too long.
   */
  async take (deadlineMs = this.#deadlineMs, signal?: AbortSignal): Promise<number> {
    const until = performance.now() + deadlineMs
    for (;;) {
      signal?.throwIfAborted()
      const empty = this.#slots.indexOf(null)
      if (empty >= 0) {
        this.#slots[empty] = 'taken'
        if (this.#unsettled.has(empty)) await this.#settled(empty)
        return empty
      }
      const idle = this.residents.filter(held => held.users === 0 && !held.pinned && !held.isAwaited)
      const least = idle.sort((a, b) => a.usedAt - b.usedAt)[0]
      if (least === undefined) {
        if (!await this.#change(until - performance.now(), signal)) throw allInUse(this.#slots.length, deadlineMs)
      } else await this.#evict(least)
    }
  }

  async #settled (slot: number): Promise<void> {
    try {
      await this.#settle()
      this.#unsettled.delete(slot)
    } catch (error) {
      this.giveBack(slot)
      throw error
    }
  }

  put (slot: number, version: AdapterVersion): void {
    this.#slots[slot] = version
    version.slot = slot
    version.usedAt = ++this.#uses
    this.#wake()
  }

  giveBack (slot: number): void {
    this.#slots[slot] = null
    this.#wake()
  }

  async #evict (version: AdapterVersion): Promise<void> {
    const slot = version.slot!
    version.image ??= await this.#memory.read(slot, version)
    // A request may have taken it meanwhile, or it has gone.
    if (version.users > 0 || version.isAwaited || version.slot !== slot) return
    version.slot = null
    this.giveBack(slot)
  }

  async #restore (version: AdapterVersion, signal?: AbortSignal): Promise<void> {
    let restoring = this.#restores.get(version)
    if (restoring === undefined) {
      restoring = this.#bring(version).finally(() => {
        this.#restores.delete(version)
      })
      this.#restores.set(version, restoring)
    }
    await withSignal(restoring, signal)
  }

  async #bring (version: AdapterVersion): Promise<void> {
    const began = { at: performance.now() }
    this.#began.add(began)
    try {
      // The last slot is for versions that are loaded meanwhile.
      while (this.residents.filter(({ users }) => users > 0).length >= this.#limit) await this.#change(Infinity)
      const slot = await this.take(Infinity)
      const { image } = version
      // Null: it was unloaded, and the requests that waited for it have gone.
      if (image === null) return this.giveBack(slot)
      try {
        await this.#memory.restore(slot, version, image)
      } catch (error) {
        this.giveBack(slot)
        throw error
      }
      version.isAwaited = version.waiting > 0
      this.put(slot, version)
      if (version.isRetired && version.requests === 0) this.#leftBy(version)
    } finally {
      this.#began.delete(began)
      this.#wake()
    }
  }

  /** A restore that began before the request has waited long, while other versions keep all slots busy. */
  #isHeldBack (version: AdapterVersion, arrived: number): boolean {
    const now = performance.now()
    return !version.pinned && [...this.#began].some(({ at }) => at < arrived && now - at > PATIENCE_MS)
  }

  #leftBy (version: AdapterVersion): void {
    if (version.isRetired) {
      const { slot } = version
      version.slot = version.image = null
      if (slot !== null) this.#slots[slot] = null
    }
    version.left()
    this.#wake()
  }

  /** Resolves to true at the next change of any slot, to false when the time has passed. */
  async #change (ms: number, signal?: AbortSignal): Promise<boolean> {
    if (ms <= 0) return false
    let listener = (): void => {}
    let timer: NodeJS.Timeout | undefined
    const changed = new Promise<boolean>(resolve => {
      listener = () => {
        resolve(true)
      }
      if (ms < LONGEST_TIMER_MS) {
        timer = setTimeout(() => {
          resolve(false)
        }, ms)
      }
    })
    this.#listeners.add(listener)
    try {
      return await withSignal(changed, signal)
    } finally {
      clearTimeout(timer)
      this.#listeners.delete(listener)
    }
  }

  #wake (): void {
    for (const listener of [...this.#listeners]) listener()
  }
}

async function withSignal<T> (promise: Promise<T>, signal?: AbortSignal): Promise<T> {
  if (signal === undefined) return await promise
  let stop = (): void => {}
  const stopped = new Promise<never>((_resolve, reject) => {
    stop = () => {
      reject(signal.reason instanceof Error ? signal.reason : new Error(String(signal.reason)))
    }
    signal.addEventListener('abort', stop, { once: true })
  })
  try {
    return await Promise.race([promise, stopped])
  } finally {
    signal.removeEventListener('abort', stop)
    promise.catch(() => {})
  }
}

function allInUse (slots: number, deadlineMs: number): RefitError {
  return new RefitError(
    'DEADLINE',
    `requests used all ${slots} slots of adapters for ${Math.round(deadlineMs)} ms; end some of them, or start with ` +
      'more slots (--max-loras). Nothing has changed'
  )
}
