import { bytesOf, dtypeOf } from '../native/dtypes.ts'
import { RECT, RECT_FIELDS, TENSOR, TENSOR_FIELDS } from '../native/write-layout.ts'
import type { NativeSource, WriteJob } from '../native/write-job.ts'

/** A rows x cols part of a tensor. */
interface Block {
  row: number
  rows: number
  col: number
  cols: number
}

/** The job for one stretch of bytes, and for each of its tensors the index in the whole job. */
export interface CutJob {
  job: WriteJob
  owners: number[]
}

/** Cuts a job whose tensors lie row-major in one source into jobs for stretches of its bytes, from front to back. */
export class JobCutter {
  readonly #job: WriteJob
  /** Tensors in the order of their bytes. */
  readonly #order: readonly number[]
  /** First rectangle of each tensor, and one more. */
  readonly #rectAt: Int32Array
  #next = 0
  #done = 0

  constructor (job: WriteJob) {
    this.#job = job
    const count = job.tensors.length / TENSOR_FIELDS
    this.#order = Array.from({ length: count }, (_, tensor) => tensor).sort((a, b) =>
      this.#begin(a) - this.#begin(b) || this.#end(a) - this.#end(b)
    )
    this.#rectAt = new Int32Array(count + 1)
    for (let at = 0; at < job.rects.length; at += RECT_FIELDS) this.#rectAt[job.rects[at + RECT.tensor]! + 1]!++
    for (let tensor = 0; tensor < count; tensor++) this.#rectAt[tensor + 1]! += this.#rectAt[tensor]!
  }

  /** All bytes before it have been cut. */
  get done (): number {
    return this.#done
  }

  /** The tensor that the next byte belongs to or precedes; undefined after the last tensor. */
  get tensor (): number | undefined {
    return this.#order[this.#next]
  }

  /** Tensors with bytes that have not been cut. */
  unfinished (done = this.#done): number[] {
    return this.#order.filter(tensor => this.#end(tensor) > done)
  }

  /**
   * The job for the bytes from `begin` on, which `source` holds: all elements that end in them and have not been cut.
   */
  cut (source: NativeSource, begin: number, length: number): CutJob {
    if (begin > this.#done) {
      throw new RangeError(`a piece begins at byte ${begin}, bytes from ${this.#done} on are missing`)
    }
    const to = begin + length
    const tensors: number[] = []
    const rects: number[] = []
    const owners: number[] = []
    for (; this.#next < this.#order.length; this.#next++) {
      const tensor = this.#order[this.#next]!
      if (this.#begin(tensor) >= to) break
      const size = this.#elementBytes(tensor)
      const cols = this.#field(tensor, 'cols')
      const first = Math.max(0, (this.#done - this.#begin(tensor)) / size)
      const last = Math.floor((Math.min(to, this.#end(tensor)) - this.#begin(tensor)) / size)
      for (const block of blocks(first, last, cols)) {
        const offset = this.#begin(tensor) + (block.row * cols + block.col) * size - begin
        this.#clip(tensor, block, owners.length, rects)
        const at = owners.length * TENSOR_FIELDS
        tensors[at + TENSOR.source] = 0
        tensors[at + TENSOR.offset] = offset
        tensors[at + TENSOR.dtype] = this.#field(tensor, 'dtype')
        tensors[at + TENSOR.rows] = block.rows
        tensors[at + TENSOR.cols] = block.cols
        tensors[at + TENSOR.rowBytes] = cols * size
        tensors[at + TENSOR.colBytes] = size
        owners.push(tensor)
      }
      if (this.#end(tensor) > to) {
        this.#done = this.#begin(tensor) + last * size
        return {
          job: { sources: [source], tensors: Float64Array.from(tensors), rects: Float64Array.from(rects) },
          owners
        }
      }
    }
    this.#done = to
    return { job: { sources: [source], tensors: Float64Array.from(tensors), rects: Float64Array.from(rects) }, owners }
  }

  /**
   * Skips the bytes before `to`, where a tensor ends: they are in place already. Returns how many of them belong to
   * tensors.
   */
  pass (to: number): number {
    let bytes = 0
    for (; this.#next < this.#order.length && this.#begin(this.#order[this.#next]!) < to; this.#next++) {
      const tensor = this.#order[this.#next]!
      bytes += this.#end(tensor) - this.#begin(tensor)
    }
    this.#done = to
    return bytes
  }

  /**
   * Adds the parts of a tensor's rectangles that lie in a block, as rectangles of tensor `index`, which the block
   * becomes.
   */
  #clip (tensor: number, block: Block, index: number, into: number[]): void {
    const { rects } = this.#job
    for (
      let at = this.#rectAt[tensor]! * RECT_FIELDS;
      at < this.#rectAt[tensor + 1]! * RECT_FIELDS;
      at += RECT_FIELDS
    ) {
      const srcRow = rects[at + RECT.srcRow]!
      const srcCol = rects[at + RECT.srcCol]!
      const top = Math.max(srcRow, block.row)
      const left = Math.max(srcCol, block.col)
      const height = Math.min(srcRow + rects[at + RECT.rows]!, block.row + block.rows) - top
      const width = Math.min(srcCol + rects[at + RECT.cols]!, block.col + block.cols) - left
      if (height <= 0 || width <= 0) continue
      const to = into.length
      into[to + RECT.tensor] = index
      into[to + RECT.rank] = rects[at + RECT.rank]!
      into[to + RECT.param] = rects[at + RECT.param]!
      into[to + RECT.srcRow] = top - block.row
      into[to + RECT.srcCol] = left - block.col
      into[to + RECT.rows] = height
      into[to + RECT.cols] = width
      into[to + RECT.dstRow] = rects[at + RECT.dstRow]! + top - srcRow
      into[to + RECT.dstCol] = rects[at + RECT.dstCol]! + left - srcCol
    }
  }

  #begin (tensor: number): number {
    return this.#field(tensor, 'offset')
  }

  #end (tensor: number): number {
    return this.#begin(tensor) +
      this.#field(tensor, 'rows') * this.#field(tensor, 'cols') * this.#elementBytes(tensor)
  }

  #elementBytes (tensor: number): number {
    return bytesOf(dtypeOf(this.#field(tensor, 'dtype')))
  }

  #field (tensor: number, field: keyof typeof TENSOR): number {
    return this.#job.tensors[tensor * TENSOR_FIELDS + TENSOR[field]]!
  }
}

/** Elements [first, last) of a row-major matrix: the rest of a row, whole rows, the beginning of a row. */
function* blocks (first: number, last: number, cols: number): Generator<Block> {
  if (last <= first) return
  let row = Math.floor(first / cols)
  const col = first % cols
  const endRow = Math.floor(last / cols)
  const endCol = last % cols
  if (col > 0) {
    yield { row, rows: 1, col, cols: (row === endRow ? endCol : cols) - col }
    if (row++ === endRow) return
  }
  if (endRow > row) yield { row, rows: endRow - row, col: 0, cols }
  if (endCol > 0) yield { row: endRow, rows: 1, col: 0, cols: endCol }
}
