/**
 * The copies of a plan, as columns: one million of them as objects would take ten times the memory. A piece is a
 * rectangle of one rank's shard that goes to one parameter of one rank of the engine. Sizes are in elements.
 */
export interface Pieces {
  length: number
  /** Index of the trainer's parameter. */
  tensor: Int32Array
  /** Index of the tensor of the model. */
  target: Int32Array
  source: Int32Array
  /** The engine's rank. */
  rank: Int32Array
  param: Int32Array
  /** Place of the first element in the shard, and elements between rows there. */
  at: Float64Array
  pitch: Int32Array
  rows: Int32Array
  cols: Int32Array
  dstRow: Int32Array
  dstCol: Int32Array
}

export function makePieces (length: number): Pieces {
  const numbers = (): Int32Array => new Int32Array(length)
  return {
    length,
    tensor: numbers(),
    target: numbers(),
    source: numbers(),
    rank: numbers(),
    param: numbers(),
    at: new Float64Array(length),
    pitch: numbers(),
    rows: numbers(),
    cols: numbers(),
    dstRow: numbers(),
    dstCol: numbers()
  }
}
