import type { LoaderTensor } from './loader-tensor.ts'

/**
 * Makes weights out of what a trainer sends under its own `load_format`. Called once per update, or once for each group of ranks that is
 * sent something else; before the update's turn at the weights comes. What it returns is checked like any payload. Whatever it throws
 * is a 400 with its name and message.
 */
export type WeightLoader = (
  tensors: readonly LoaderTensor[],
  tools: LoaderTools
) =>
  | Iterable<LoadedTensor>
  | AsyncIterable<LoadedTensor>
  | Promise<Iterable<LoadedTensor> | AsyncIterable<LoadedTensor>>

/** A whole tensor by its name in checkpoints: one that was sent (or a view of it), or one that the loader made. */
export type LoadedTensor = readonly [name: string, tensor: LoaderTensor | MadeTensor]

export interface MadeTensor {
  /** As torch names it: `bfloat16`, `float16` or `float32`. */
  dtype: string
  shape: readonly number[]
  /** Row-major, little-endian. Left alone by the loader until the update has ended. */
  data: Uint8Array
}

export interface LoaderTools {
  /** The ranks that these tensors were sent to. */
  ranks: readonly number[]
  /** Aborted once the loader has used up its time (60 s). */
  signal: AbortSignal
  /**
   * The bytes of a tensor in CPU memory, row-major: at most 16 MiB at once and 64 MiB in one request. Where the ranks were sent
   * different ones, those of the first of them.
   */
  read: (tensor: LoaderTensor) => Promise<Uint8Array>
  /**
   * Reads a pickle, or base64 of one, as data: nothing is imported or called. Lists, tuples and sets come as arrays, dicts as objects (or
   * a Map, where keys are not text), bytes as Uint8Array, dtypes by their names, instances of `classes` (names in any module) as objects
   * of their fields, and handles of tensors, also by GPU, as LoaderTensors, which are opened and given back with the request. Equal bytes are read once:
   * a second call has the outcome of the first.
   */
  unpickle: (bytes: Uint8Array, options?: { classes?: readonly string[] }) => Promise<unknown>
}
