import { slotOf } from '../process-groups/pieces.ts'
import { longestPiece } from '../model/checkpoint-layout.ts'
import type { CheckpointPiece } from '../model/checkpoint-layout.ts'
import type { NativeGroups } from '../native/groups.ts'
import type { StreamPiece, WeightStream } from '../contract/weight-stream.ts'

export interface PieceStreamOptions {
  addon: NativeGroups
  group: number
  /** Staging and beginning require that no step runs, and so does receiving in place. */
  needsGate: boolean
  /** Runs a function while no step runs. */
  still: (run: () => Promise<void>) => Promise<void>
  /** In the sender's order. */
  pieces: readonly CheckpointPiece[]
  timeoutMs: number
  /** Starts the sender, once there is room for the first piece. */
  begin: () => Promise<void>
  /** Called with the bytes received so far. */
  onProgress?: (bytes: number) => void
}

/**
 * The pieces that rank 0 of a group broadcasts. One is received into a slot while the previous one is written from the
 * other.
 */
export class PieceStream implements WeightStream {
  readonly #options: PieceStreamOptions
  #index = 0
  #receiving: Promise<void> | undefined
  #begun: Promise<void> | undefined

  constructor (options: PieceStreamOptions) {
    this.#options = options
  }

  /** Receives the first piece early; if that needs the gate, `next` receives it. */
  async ready (): Promise<void> {
    if (!this.#options.needsGate) await this.#receive()
  }

  async next (): Promise<StreamPiece | undefined> {
    const { pieces, group, onProgress } = this.#options
    const piece = pieces[this.#index]
    if (piece === undefined) return undefined
    await this.#receive()
    const slot = slotOf(this.#index++)
    this.#receiving = undefined
    // The caller has written its previous piece, so that slot can take the next one.
    if (this.#index < pieces.length) this.#receive().catch(() => {})
    onProgress?.(piece.begin + piece.length)
    return { begin: piece.begin, length: piece.length, source: { staged: { group, slot } } }
  }

  async #receive (): Promise<void> {
    if (this.#index >= this.#options.pieces.length) return
    this.#receiving ??= this.#take(this.#index)
    await this.#receiving
  }

  async #take (index: number): Promise<void> {
    const { addon, group, pieces, timeoutMs, begin, still } = this.#options
    this.#begun ??= still(async () => {
      await addon.stageGroup(group, longestPiece(pieces), Math.min(pieces.length, 2))
      await begin()
    })
    await this.#begun
    await addon.groupReceive(group, slotOf(index), Float64Array.of(0, pieces[index]!.length), 0, timeoutMs)
  }
}
