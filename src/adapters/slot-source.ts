import type { AnnouncedTensor, StoredSource } from '../contract/weight-source.ts'
import type { Rect, TensorEntry } from '../model/architecture.ts'
import type { MatchedTensor } from '../weights/match.ts'

// Tensors and the places in a slot that they go to, as a layout of copies reads them.

export interface Placed {
  tensor: AnnouncedTensor
  rects: Rect[]
}

export function matched ({ tensor, rects }: Placed): MatchedTensor {
  const [rows, cols] = tensor.shape as [number, number]
  const plan: TensorEntry = {
    name: tensor.name,
    shape: tensor.shape,
    rows,
    cols,
    rects,
    dtype: 'float32',
    alternative: true
  }
  return { plan, tensor, ranks: null }
}

/** Buffers of this process as a source. */
export function memorySource (sources: StoredSource['sources'], tensors: readonly AnnouncedTensor[]): StoredSource {
  return {
    kind: 'stored',
    transport: { name: 'host memory', readError: 'INTERNAL' },
    tensors,
    sources,
    verify: async () => {},
    close: async () => {}
  }
}
