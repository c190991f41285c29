import type { NativeAddon } from '../../../src/native/addon.ts'
import type { CoreConfig } from '../../../src/native/core-config.ts'

/** A rectangle without its tensor: rank, parameter, srcRow, srcCol, rows, cols, dstRow, dstCol. */
export type PlainRect = [number, number, number, number, number, number, number, number]
export interface PlainTensor {
  name: string
  rows: number
  cols: number
  rects: PlainRect[]
}
export interface PlainModel {
  config: CoreConfig
  tensors: PlainTensor[]
}

export interface PlainOptions {
  ranks?: number
  dtype?: CoreConfig['dtype']
  hidden?: number
  vocab?: number
  inter?: number
  threads?: number
}

const HEADS = 4
const KV_HEADS = 2

/** A dense model of one layer with its parameters and sharding written out by hand, without code of src/model. */
export function plainModel (
  { ranks = 1, dtype = 'bfloat16', hidden = 64, vocab = 128, inter = 96, threads = 2 }: PlainOptions = {}
): PlainModel {
  const headDim = 16
  const q = HEADS / ranks * headDim
  const kv = Math.max(1, KV_HEADS / ranks) * headDim
  const shapes = [
    { name: 'embed', rows: vocab / ranks, cols: hidden },
    { name: 'layers.0.ln1', rows: hidden, cols: 1 },
    { name: 'layers.0.qkv', rows: q + 2 * kv, cols: hidden },
    { name: 'layers.0.o', rows: hidden, cols: q },
    { name: 'layers.0.ln2', rows: hidden, cols: 1 },
    { name: 'layers.0.gate_up', rows: 2 * inter / ranks, cols: hidden },
    { name: 'layers.0.down', rows: hidden, cols: inter / ranks },
    { name: 'norm', rows: hidden, cols: 1 }
  ]
  const params = shapes.map(shape => ({ ...shape, dtype }))
  const all = (rect: (rank: number) => PlainRect): PlainRect[] => Array.from({ length: ranks }, (_, rank) => rect(rank))
  const kvRow = (rank: number): number => Math.floor(rank * KV_HEADS / ranks) * headDim
  const tensors: PlainTensor[] = [
    {
      name: 'embed',
      rows: vocab,
      cols: hidden,
      rects: all(r => [r, 0, r * vocab / ranks, 0, vocab / ranks, hidden, 0, 0])
    },
    { name: 'ln1', rows: hidden, cols: 1, rects: all(r => [r, 1, 0, 0, hidden, 1, 0, 0]) },
    { name: 'q', rows: HEADS * headDim, cols: hidden, rects: all(r => [r, 2, r * q, 0, q, hidden, 0, 0]) },
    { name: 'k', rows: KV_HEADS * headDim, cols: hidden, rects: all(r => [r, 2, kvRow(r), 0, kv, hidden, q, 0]) },
    { name: 'v', rows: KV_HEADS * headDim, cols: hidden, rects: all(r => [r, 2, kvRow(r), 0, kv, hidden, q + kv, 0]) },
    { name: 'o', rows: hidden, cols: HEADS * headDim, rects: all(r => [r, 3, 0, r * q, hidden, q, 0, 0]) },
    { name: 'ln2', rows: hidden, cols: 1, rects: all(r => [r, 4, 0, 0, hidden, 1, 0, 0]) },
    {
      name: 'gate',
      rows: inter,
      cols: hidden,
      rects: all(r => [r, 5, r * inter / ranks, 0, inter / ranks, hidden, 0, 0])
    },
    {
      name: 'up',
      rows: inter,
      cols: hidden,
      rects: all(r => [r, 5, r * inter / ranks, 0, inter / ranks, hidden, inter / ranks, 0])
    },
    {
      name: 'down',
      rows: hidden,
      cols: inter,
      rects: all(r => [r, 6, 0, r * inter / ranks, hidden, inter / ranks, 0, 0])
    },
    { name: 'norm', rows: hidden, cols: 1, rects: all(r => [r, 7, 0, 0, hidden, 1, 0, 0]) }
  ]
  return {
    config: {
      device: 'cpu',
      ranks,
      threads,
      dtype,
      recipe: {
        hiddenSize: hidden,
        layers: 1,
        heads: HEADS,
        kvHeads: KV_HEADS,
        headDim,
        vocabSize: vocab,
        rmsNormEps: 1e-6,
        normPlacement: 'pre',
        qkNorm: 'none',
        activation: 'silu',
        roundOnce: false,
        qkvBias: false,
        oBias: false,
        tieWordEmbeddings: true,
        ropeInvFreq: Float64Array.from({ length: headDim / 2 }, (_, i) => 10000 ** (-2 * i / headDim)),
        ropeScale: 1,
        sparseLayers: new Uint8Array(1),
        experts: 0,
        expertsPerToken: 0,
        normTopkProb: false
      },
      params,
      pages: 4,
      pageSize: 16
    },
    tensors
  }
}

/** The stored bytes of every parameter, rank-major. */
export async function readAll (addon: NativeAddon, core: number, { config }: PlainModel): Promise<Uint8Array[]> {
  const reads: Array<Promise<Uint8Array>> = []
  for (let rank = 0; rank < config.ranks; rank++) {
    for (const [id, param] of config.params.entries()) {
      reads.push(addon.read(core, rank, id, 0, 0, param.rows, param.cols))
    }
  }
  return await Promise.all(reads)
}
