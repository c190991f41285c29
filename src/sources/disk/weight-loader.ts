import type { LoaderTensor } from './loader-tensor.ts'

/**
 * Makes weights of the tensors that a trainer sends under its own `load_format`. It is called before the update enters
 * its queue, once per update, or once for each group of ranks with different tensors. Its result is checked like any
 * payload. An error that it throws becomes a 400 with its name and message.
 */
export type WeightLoader = (
  tensors: readonly LoaderTensor[],
  tools: LoaderTools
) =>
  | Iterable<LoadedTensor>
  | AsyncIterable<LoadedTensor>
  | Promise<Iterable<LoadedTensor> | AsyncIterable<LoadedTensor>>

/** A whole tensor by its name in checkpoints: a tensor that was sent, a view of it, or one that the loader made. */
export type LoadedTensor = readonly [name: string, tensor: LoaderTensor | MadeTensor]

export interface MadeTensor {
  /** torch's name: `bfloat16`, `float16` or `float32`. */
  dtype: string
  shape: readonly number[]
  /** Row-major, little-endian. The loader must not change it until the update has ended. */
  data: Uint8Array
}

export interface LoaderTools {
  /** The ranks to which these tensors were sent. */
  ranks: readonly number[]
  /** Aborted once the loader has used up its time (60 s). */
  signal: AbortSignal
  /**
   * The bytes of a tensor in CPU memory, row-major: at most 16 MiB at once and 64 MiB in one request. If the ranks have
   * different tensors, those of the first rank.
   */
  read: (tensor: LoaderTensor) => Promise<Uint8Array>
  /**
   * Reads a pickle, or base64 of one, as data: nothing is imported or called. Lists, tuples and sets become arrays,
   * dicts objects (or a Map, if keys are not text), bytes Uint8Arrays, dtypes their names, and instances of `classes`
   * (names in any module) objects of their fields. Handles of tensors, also by GPU, become LoaderTensors, which are
   * opened and released with the request. Equal bytes are read once: a second call returns the outcome of the first.
   */
  unpickle: (bytes: Uint8Array, options?: { classes?: readonly string[] }) => Promise<unknown>
}
