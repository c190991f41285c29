import type { WeightState } from '../engine/rollout-engine.ts'
import { tornReason } from './torn-reason.ts'

/**
 * What the engine's weights are, apart from their bytes: the label, the epoch, and which checkpoint tensors are torn.
 * The only place where any of the three moves; docs/updates.md shows the edges. It knows no gate, no thread and no device.
 */
export class WeightLedger {
  #version: string
  #epoch = 0
  readonly #torn = new Set<string>()
  #reason = ''
  /** Epoch of the last write of each tensor. */
  readonly #writtenAt = new Map<string, number>()

  /** Starts with all of `names` torn: nothing has been loaded. */
  constructor (names: Iterable<string>, version: string) {
    for (const name of names) this.#torn.add(name)
    this.#reason = 'no weights have been loaded'
    this.#version = version
  }

  get version (): string { return this.#version }
  get epoch (): number { return this.#epoch }
  get torn (): boolean { return this.#torn.size > 0 }

  get state (): WeightState {
    return this.#torn.size === 0 ? { state: 'current' } : { state: 'torn', tensors: [...this.#torn].sort(), reason: this.#reason }
  }

  /** Why the engine may not generate, naming at most three tensors; null when it may. */
  get tornReason (): string | null {
    const { state } = this
    return state.state === 'torn' ? tornReason(state) : null
  }

  /** Epoch of a tensor's last write, 0 if never. */
  writtenAt (name: string): number { return this.#writtenAt.get(name) ?? 0 }

  /** All of `names` hold what was sent. */
  wrote (names: Iterable<string>): void {
    this.#epoch++
    for (const name of names) this.#heal(name)
  }

  /** A write ended in its middle: `whole` arrived, `rest` did not (old, new or mixed bytes: nobody may rely on them). */
  tore (whole: Iterable<string>, rest: Iterable<string>, reason: string): void {
    this.#epoch++
    for (const name of whole) this.#heal(name)
    for (const name of rest) this.#torn.add(name)
    this.#reason = reason
  }

  /** Moves the label; allowed while torn (a trainer may label before it repeats), never by a failed write. */
  label (version: string): void { this.#version = version }

  #heal (name: string): void {
    this.#torn.delete(name)
    this.#writtenAt.set(name, this.#epoch)
  }
}
