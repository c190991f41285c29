// The packed rows of a write, as native/binding/write_layout.h lays them out; `addon.layouts` reports the addon's own.

/**
 * Fields of one tensor in `WriteJob.tensors`. `offset` is the byte of element [0, 0] in its source, `dtype` a number of
 * DTYPES; `rowBytes` and `colBytes` are the strides. `colBytes` is the element's size, except in transposed and stepped
 * views.
 */
export const TENSOR = { source: 0, offset: 1, dtype: 2, rows: 3, cols: 4, rowBytes: 5, colBytes: 6 } as const
/** Length of a tensor's row. */
export const TENSOR_FIELDS = 7

/** Fields of one rectangle in `WriteJob.rects` and in `checksum`. Positions and sizes are in elements. */
export const RECT = {
  tensor: 0,
  rank: 1,
  param: 2,
  srcRow: 3,
  srcCol: 4,
  rows: 5,
  cols: 6,
  dstRow: 7,
  dstCol: 8
} as const
/** Length of a rectangle's row. */
export const RECT_FIELDS = 9

/** States of a tensor after a write, in `WriteOutcome.states`. */
export const TENSOR_UNTOUCHED = 0
export const TENSOR_PARTIAL = 1
export const TENSOR_WRITTEN = 2
