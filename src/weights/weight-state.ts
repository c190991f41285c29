import type { ReleasedMemory, WeightState } from '../contract/rollout-engine.ts'
import type { MemoryTag } from '../native/addon.ts'
import type { GateOpening } from '../contract/gate.ts'
import { asleepReason, tornReason } from './state-reason.ts'

/**
 * What the engine's weights are, apart from their bytes: the label, the epoch, which checkpoint tensors are torn, and which memory is
 * released. The only place where any of them moves; docs/updates.md and docs/memory.md show the edges. It knows no gate, no thread
 * and no device.
 */
export class WeightLedger {
  readonly #names: readonly string[]
  #version: string
  #epoch = 0
  readonly #torn = new Set<string>()
  #reason = ''
  /** Epoch of the last write of each tensor. */
  readonly #writtenAt = new Map<string, number>()
  /** Bytes given back. */
  readonly #released = new Map<MemoryTag, number>()

  /** Starts with all of `names` torn: nothing has been loaded. */
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
  /** Some bytes may not be relied on. While their memory is released there are none. */
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

  /** Why the engine may not generate, naming at most three tensors; null when it may. */
  get tornReason (): string | null {
    const { state } = this
    return state.state === 'torn' ? tornReason(state) : null
  }

  /** What the scheduler is told when the gate opens. */
  opening (flushCache: boolean): GateOpening {
    const tags = [...this.#released.keys()]
    return {
      epoch: this.#epoch,
      version: this.#version,
      flushCache,
      torn: this.tornReason,
      asleep: tags.length === 0 ? null : asleepReason(tags)
    }
  }

  isReleased (tag: MemoryTag): boolean {
    return this.#released.has(tag)
  }

  /** Tensors that no write has brought since an epoch, or that are torn. */
  notWrittenSince (epoch: number): string[] {
    return this.#names.filter(name => this.writtenAt(name) <= epoch || this.#torn.has(name))
  }

  /** Epoch of a tensor's last write, 0 if never. */
  writtenAt (name: string): number {
    return this.#writtenAt.get(name) ?? 0
  }

  /** All of `names` hold what was sent. */
  markWritten (names: Iterable<string>): void {
    this.#epoch++
    for (const name of names) this.#heal(name)
  }

  /** The same for every tensor. */
  markAllWritten (): void {
    this.markWritten(this.#names)
  }

  /** A write ended in its middle: `whole` arrived, `rest` did not (old, new or mixed bytes: nobody may rely on them). */
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

  /** The memory behind a tag is gone, or about to go. */
  markReleased (tag: MemoryTag, bytes: number): void {
    this.#released.set(tag, bytes)
  }

  /** It is back. `kept`: with the bytes that it had. */
  markResumed (tag: MemoryTag, kept: boolean): void {
    this.#released.delete(tag)
    if (tag === 'weights' && !kept) this.markAllTorn('their memory was released and came back empty')
  }

  /** Moves the label; allowed while torn (a trainer may label before it repeats), never by a failed write. */
  label (version: string): void {
    this.#version = version
  }

  #heal (name: string): void {
    this.#torn.delete(name)
    this.#writtenAt.set(name, this.#epoch)
  }
}
