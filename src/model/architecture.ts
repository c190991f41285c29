import type { NativeParam } from '../native/core-config.ts'
import type { DType, HeldDType } from '../native/dtypes.ts'
import type { ModelRecipe } from '../native/recipe.ts'
import type { AdapterModule } from './adapter-modules.ts'
import type { AdapterSlots } from './adapter-slots.ts'
import type { ArchitectureName } from './families.ts'

/**
 * config.json in one form for all families and both generations of transformers: the recipe, and fields that only
 * TypeScript needs.
 */
export interface Architecture extends ModelRecipe {
  name: ArchitectureName
  /** `model_type` of config.json. */
  modelType: string
  /** Width of the dense MLP. */
  intermediateSize: number
  /** Width of one expert; 0 if no layer is sparse. */
  expertIntermediateSize: number
  /** Longest sequence, in tokens (`max_position_embeddings`). */
  contextLength: number
  /** `dtype` / `torch_dtype` of the file. */
  dtype: DType
  bosTokenId: number | null
  /** End-of-sequence ids of generation_config.json, else of config.json. */
  eosTokenIds: number[]
}

/**
 * A rectangle of a checkpoint tensor and its place, in elements; tensors are seen as [rows, cols] (see `TensorEntry`).
 */
export interface Rect {
  rank: number
  /** Index in `ModelTable.params`. */
  param: number
  srcRow: number
  srcCol: number
  rows: number
  cols: number
  dstRow: number
  dstCol: number
}

/**
 * One checkpoint tensor: its shape as files have it, the same seen as a matrix (1-D [n] is [n, 1]; 3-D [e, r, c] is [e
 * * r, c]), and its rectangles.
 */
export interface TensorEntry {
  name: string
  shape: number[]
  rows: number
  cols: number
  rects: Rect[]
  /** Dtype of the parameters that hold it; they all have the same one. */
  dtype: HeldDType
  /** An accepted second spelling (fused experts): not counted as missing. */
  alternative: boolean
}

/** A parameter of every rank: fused, sharded, at a fixed address. A vector is [n, 1]. */
export type Param = NativeParam

/**
 * The table of an architecture under a layout: every parameter of a rank, and every checkpoint name with its
 * rectangles.
 */
export interface ModelTable {
  ranks: number
  params: Param[]
  /** How many of them hold weights; the slots of adapters follow. */
  weights: number
  tensors: Map<string, TensorEntry>
  /**
   * True for names that checkpoints contain and no parameter needs (tied head, rotary buffers): accepted and skipped.
   */
  ignored: (name: string) => boolean
  /** The table's name for a name that a trainer sent (prefix rules), or the name unchanged. */
  canonical: (name: string) => string
  /** Slots of LoRA adapters and the modules that they have room for, by name; absent if the engine takes none. */
  adapters?: AdapterSlots & { modules: ReadonlyMap<string, AdapterModule> }
}
