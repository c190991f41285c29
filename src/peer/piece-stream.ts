import { slotOf } from '../process-groups/pieces.ts'
import { longestPiece } from '../model/checkpoint-layout.ts'
import type { CheckpointPiece } from '../model/checkpoint-layout.ts'
import type { NativeGroups } from '../native/groups.ts'
import type { StreamPiece, WeightStream } from '../contract/weight-stream.ts'

export interface PieceStreamOptions {
  addon: NativeGroups
  group: number
  /** Making room and receiving want the gate shut. */
  needsGate: boolean
  /** In the sender's order. */
  pieces: readonly CheckpointPiece[]
  timeoutMs: number
  /** Has the sender begin: there is room for the first piece. */
  begin: () => Promise<void>
  /** Bytes that have come. */
  onProgress?: (bytes: number) => void
}

/** Pieces as rank 0 of a group broadcasts them: one is received into a slot while the one before is written from the other. */
export class PieceStream implements WeightStream {
  readonly #options: PieceStreamOptions
  #index = 0
  #coming: Promise<void> | undefined
  #staged: Promise<void> | undefined

  constructor (options: PieceStreamOptions) {
    this.#options = options
  }

  /** The first piece; behind a gate it comes with `next`. */
  async ready (): Promise<void> {
    if (!this.#options.needsGate) await this.#receive()
  }

  async next (): Promise<StreamPiece | undefined> {
    const { pieces, group, onProgress } = this.#options
    const piece = pieces[this.#index]
    if (piece === undefined) return undefined
    await this.#receive()
    const slot = slotOf(this.#index++)
    this.#coming = undefined
    // What the caller had before this call is written: its slot takes the next.
    if (this.#index < pieces.length) this.#receive().catch(() => {})
    onProgress?.(piece.begin + piece.length)
    return { begin: piece.begin, length: piece.length, source: { staged: { group, slot } } }
  }

  async #receive (): Promise<void> {
    if (this.#index >= this.#options.pieces.length) return
    this.#coming ??= this.#take(this.#index)
    await this.#coming
  }

  async #take (index: number): Promise<void> {
    const { addon, group, pieces, timeoutMs, begin } = this.#options
    this.#staged ??= addon.stageGroup(group, longestPiece(pieces), Math.min(pieces.length, 2))
    await this.#staged
    if (index === 0) await begin()
    await addon.groupReceive(group, slotOf(index), Float64Array.of(0, pieces[index]!.length), 0, timeoutMs)
  }
}
