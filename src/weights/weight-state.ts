import type { ReleasedMemory, WeightState } from '../contract/rollout-engine.ts'
import type { MemoryTag } from '../native/addon.ts'
import type { GateOpening } from '../contract/gate.ts'
import { asleepReason, tornReason } from './state-reason.ts'

/**
 * The state of an engine's weights, apart from their bytes: the label, the epoch, the torn checkpoint tensors and the
 * released memory. Nothing else changes them; docs/updates.md and docs/memory.md show the transitions. It knows no
 * gate, no thread and no device.
 */
export class WeightLedger {
  readonly #names: readonly string[]
  #version: string
  #epoch = 0
  #set = 0
  readonly #torn = new Set<string>()
  #reason = ''
  /** Epoch of the last write of each tensor. */
  readonly #writtenAt = new Map<string, number>()
  /** Bytes that were released. */
  readonly #released = new Map<MemoryTag, number>()

  /** At the start all of `names` are torn, because nothing has been loaded. */
  constructor (names: Iterable<string>, version: string) {
    this.#names = [...names]
    for (const name of this.#names) this.#torn.add(name)
    this.#reason = 'no weights have been loaded'
    this.#version = version
  }

  get version (): string {
    return this.#version
  }
  get epoch (): number {
    return this.#epoch
  }
  /** The set of weights that steps use; 0 on an engine with one. All else here is about this set. */
  get set (): number {
    return this.#set
  }
  /** Names of all tensors. */
  get names (): readonly string[] {
    return this.#names
  }
  /** Some bytes are indeterminate. While their memory is released, there are no bytes. */
  get torn (): boolean {
    return this.#torn.size > 0 && !this.#released.has('weights')
  }
  get released (): ReleasedMemory {
    return Object.fromEntries(this.#released)
  }

  get state (): WeightState {
    if (this.torn) return { state: 'torn', tensors: [...this.#torn].sort(), reason: this.#reason }
    return this.#released.size === 0 ? { state: 'current' } : { state: 'asleep', tags: [...this.#released.keys()] }
  }

  /** Why the engine cannot generate, with at most three tensors; null if it can. */
  get tornReason (): string | null {
    const { state } = this
    return state.state === 'torn' ? tornReason(state) : null
  }

  /** The state that the scheduler gets when the gate opens. */
  opening (flushCache: boolean): GateOpening {
    const tags = [...this.#released.keys()]
    return {
      set: this.#set,
      epoch: this.#epoch,
      version: this.#version,
      flushCache,
      torn: this.tornReason,
      asleep: tags.length === 0 ? null : asleepReason(tags)
    }
  }

  /** A tensor's bytes are indeterminate. */
  isTorn (name: string): boolean {
    return this.#torn.has(name)
  }

  isReleased (tag: MemoryTag): boolean {
    return this.#released.has(tag)
  }

  /** Tensors that no write has supplied since an epoch, or that are torn. */
  notWrittenSince (epoch: number): string[] {
    return this.#names.filter(name => this.writtenAt(name) <= epoch || this.#torn.has(name))
  }

  /** Epoch of a tensor's last write, 0 if never. */
  writtenAt (name: string): number {
    return this.#writtenAt.get(name) ?? 0
  }

  /** All of `names` hold the values that were sent. */
  markWritten (names: Iterable<string>): void {
    this.#epoch++
    for (const name of names) this.#heal(name)
  }

  /** Another set is in use from now on: its `names` hold the values that were sent, all else is equal. */
  markSwapped (set: number, names: Iterable<string>): void {
    this.#set = set
    this.markWritten(names)
  }

  /** The same as `markWritten` for every tensor. */
  markAllWritten (): void {
    this.markWritten(this.#names)
  }

  /** A write broke off: `whole` arrived, `rest` did not and may hold old, new or mixed bytes. */
  markTorn (whole: Iterable<string>, rest: Iterable<string>, reason: string): void {
    this.#epoch++
    for (const name of whole) this.#heal(name)
    for (const name of rest) this.#torn.add(name)
    this.#reason = reason
  }

  /** The same for every tensor. */
  markAllTorn (reason: string): void {
    this.markTorn([], this.#names, reason)
  }

  /** The memory behind a tag is released, or is about to be. */
  markReleased (tag: MemoryTag, bytes: number): void {
    this.#released.set(tag, bytes)
  }

  /** The memory is back. `kept`: with its former bytes. */
  markResumed (tag: MemoryTag, kept: boolean): void {
    this.#released.delete(tag)
    if (tag === 'weights' && !kept) this.markAllTorn('their memory was released and came back empty')
  }

  /**
   * Moves the label. Allowed while torn (a trainer may set the label before it repeats a write); a failed write never
   * moves it.
   */
  label (version: string): void {
    this.#version = version
  }

  #heal (name: string): void {
    this.#torn.delete(name)
    this.#writtenAt.set(name, this.#epoch)
  }
}
