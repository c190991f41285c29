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

/** The elements of a tensor in the order of their bytes: `count` lines of `length` elements, one after another. */
interface Lines {
  count: number
  length: number
  /** Bytes from a line to the next, and from element to element. */
  pitch: number
  step: number
  /** Lines are columns, as in a transposed view. */
  byColumns: boolean
}

/**
 * Cuts a job whose tensors lie in one source into jobs for stretches of its bytes, from front to back. Rows of a tensor
 * follow each other, or its columns do. Several tensors may lie between each other's elements or in the same bytes if
 * they are parts of one larger tensor.
 */
export class JobCutter {
  readonly #job: WriteJob
  /** Tensors in the order of their first bytes. */
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
    let done = to
    for (let next = this.#next; next < this.#order.length; next++) {
      const tensor = this.#order[next]!
      if (this.#begin(tensor) >= to) break
      const size = this.#elementBytes(tensor)
      const lines = this.#lines(tensor)
      const first = elementsBefore(lines, this.#done - this.#begin(tensor))
      const last = elementsBefore(lines, to - size + 1 - this.#begin(tensor))
      for (const block of blocks(first, last, lines)) {
        const offset = this.#begin(tensor) + block.row * this.#field(tensor, 'rowBytes') +
          block.col * this.#field(tensor, 'colBytes') - begin
        this.#clip(tensor, block, owners.length, rects)
        const at = owners.length * TENSOR_FIELDS
        tensors[at + TENSOR.source] = 0
        tensors[at + TENSOR.offset] = offset
        tensors[at + TENSOR.dtype] = this.#field(tensor, 'dtype')
        tensors[at + TENSOR.rows] = block.rows
        tensors[at + TENSOR.cols] = block.cols
        tensors[at + TENSOR.rowBytes] = this.#field(tensor, 'rowBytes')
        tensors[at + TENSOR.colBytes] = this.#field(tensor, 'colBytes')
        owners.push(tensor)
      }
      // The next piece begins with an element that this one ends in.
      if (last < lines.count * lines.length) done = Math.min(done, this.#begin(tensor) + byteOf(lines, last))
    }
    this.#done = done
    while (this.#next < this.#order.length && this.#end(this.#order[this.#next]!) <= done) this.#next++
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
      bytes += this.#field(tensor, 'rows') * this.#field(tensor, 'cols') * this.#elementBytes(tensor)
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
    const lines = this.#lines(tensor)
    const elements = lines.count * lines.length
    return this.#begin(tensor) + (elements === 0 ? 0 : byteOf(lines, elements - 1) + this.#elementBytes(tensor))
  }

  #lines (tensor: number): Lines {
    const [rows, cols] = [this.#field(tensor, 'rows'), this.#field(tensor, 'cols')]
    const [rowBytes, colBytes] = [this.#field(tensor, 'rowBytes'), this.#field(tensor, 'colBytes')]
    const byColumns = rows > 1 && cols > 1 && colBytes > rowBytes
    const [count, length] = byColumns ? [cols, rows] : [rows, cols]
    const step = length === 1 ? this.#elementBytes(tensor) : byColumns ? rowBytes : colBytes
    return { count, length, step, pitch: count === 1 ? length * step : byColumns ? colBytes : rowBytes, byColumns }
  }

  #elementBytes (tensor: number): number {
    return bytesOf(dtypeOf(this.#field(tensor, 'dtype')))
  }

  #field (tensor: number, field: keyof typeof TENSOR): number {
    return this.#job.tensors[tensor * TENSOR_FIELDS + TENSOR[field]]!
  }
}

/** Byte of an element, from the tensor's first. */
function byteOf ({ length, pitch, step }: Lines, element: number): number {
  return Math.floor(element / length) * pitch + element % length * step
}

/** Elements that begin before a byte, which counts from the tensor's first. */
function elementsBefore ({ count, length, pitch, step }: Lines, byte: number): number {
  if (byte <= 0 || length === 0) return 0
  const line = Math.floor(byte / pitch)
  return line >= count ? count * length : line * length + Math.min(length, Math.ceil((byte - line * pitch) / step))
}

/** Elements [first, last): the rest of a line, whole lines, the beginning of a line. */
function* blocks (first: number, last: number, { length, byColumns }: Lines): Generator<Block> {
  const block = (line: number, lines: number, at: number, elements: number): Block =>
    byColumns
      ? { row: at, rows: elements, col: line, cols: lines }
      : { row: line, rows: lines, col: at, cols: elements }
  if (last <= first) return
  let line = Math.floor(first / length)
  const at = first % length
  const endLine = Math.floor(last / length)
  const endAt = last % length
  if (at > 0) {
    yield block(line, 1, at, (line === endLine ? endAt : length) - at)
    if (line++ === endLine) return
  }
  if (endLine > line) yield block(line, endLine - line, 0, length)
  if (endAt > 0) yield block(endLine, 1, 0, endAt)
}
