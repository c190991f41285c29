import { PART_FIELDS } from '../native/groups.ts'
import type { WriteJob } from '../native/write-job.ts'
import { joinPieces } from './pieces.ts'
import type { Piece } from './pieces.ts'

/**
 * For each piece the places in the weights that its broadcasts go to, in the form of `parts`; undefined if it must be
 * staged.
 */
export type Places = ReadonlyArray<Float64Array | undefined>

/** Finds the pieces that can be received straight into the weights. */
export class DirectPlaces {
  /** Trainers repeat the same announcement at every step, and then its job has the same rectangles. */
  readonly #known = new WeakMap<Float64Array, { parts: Float64Array, tensors: Float64Array, places: Places }>()

  /** `find`: `groupPlaces` of the addon, whose result is negative for a broadcast that must be staged. */
  of (
    pieces: readonly Piece[],
    job: WriteJob,
    find: (parts: Float64Array, job: WriteJob) => Float64Array
  ): Places {
    const { parts } = joinPieces(pieces)
    const known = this.#known.get(job.rects)
    if (known !== undefined && areEqual(known.parts, parts) && areEqual(known.tensors, job.tensors)) return known.places
    const found = find(parts, job)
    let next = 0
    const places = pieces.map(({ parts }) => {
      const own = Float64Array.from(parts, (value, at) => at % PART_FIELDS === 0 ? found[next++]! : value)
      return own.every((value, at) => at % PART_FIELDS !== 0 || value >= 0) ? own : undefined
    })
    this.#known.set(job.rects, { parts, tensors: job.tensors, places })
    return places
  }
}

function areEqual (a: Float64Array, b: Float64Array): boolean {
  return Buffer.compare(
    new Uint8Array(a.buffer, a.byteOffset, a.byteLength),
    new Uint8Array(b.buffer, b.byteOffset, b.byteLength)
  ) === 0
}
