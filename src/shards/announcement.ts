import type { DType } from '../native/dtypes.ts'

// The announcement of a trainer's shards (docs/shards.md, format refit.shards/1).

/** How one dimension of a device mesh cuts a tensor; see `cutAxis`. */
export type Placement = { kind: 'replicate' } | { kind: 'shard', dim: number, split: number }

/** Ranks in the form of `shape`, row-major. Placements apply from left to right, each to what the one before left. */
export interface MeshLayout {
  kind: 'mesh'
  shape: readonly number[]
  ranks: readonly number[]
  placements: readonly Placement[]
}

/** Boxes of the tensor, as torch.distributed.checkpoint lists them. */
export interface BoxLayout {
  kind: 'boxes'
  boxes: ReadonlyArray<{ rank: number, offset: readonly number[], shape: readonly number[] }>
}

/** Ranges of the elements of the flattened tensor (FSDP1); they may begin and end inside a row. */
export interface FlatLayout {
  kind: 'flat'
  ranges: ReadonlyArray<{ rank: number, from: number, to: number }>
}

export type ShardLayout = MeshLayout | BoxLayout | FlatLayout

/** Rows of a fused tensor that belong to one tensor of the model. */
export interface FusedPart {
  name: string
  /** Rows of it in each repetition of the pattern. */
  rows: number
}

/** One parameter of the trainer. */
export interface ShardTensor {
  /** The name in checkpoints or, for a fused one, any name that is unique. */
  name: string
  /** The shape of the whole parameter, over all ranks. */
  shape: readonly number[]
  /** Dtype of the bytes that are sent. */
  dtype: DType
  /** Index in `layouts`. */
  layout: number
  /**
   * The tensors of the model whose rows it contains, in turns: `rows` rows of the first, of the second, ..., and again
   * until its end. Absent: it is the tensor of its own name.
   */
  into?: readonly FusedPart[]
  /** It has more rows than the model's tensor: they pad a vocabulary, and are not sent. */
  isPadded?: boolean
}

export interface ShardAnnouncement {
  /** Number of ranks of the trainer. */
  world: number
  layouts: readonly ShardLayout[]
  tensors: readonly ShardTensor[]
  /** The most bytes of one chunk, over all ranks. */
  chunkBytes: number
  /** Tensors of the model may be absent. */
  allowMissing: boolean
}
