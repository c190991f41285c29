import { setImmediate as breathe } from 'node:timers/promises'
import { formatError, parseHeaderInSlices } from '../../wire/safetensors/header.ts'
import type { SafetensorsTensor } from '../../wire/safetensors/header.ts'
import { describeUnreadName, toDType } from '../../wire/safetensors/dtypes.ts'
import type { AnnouncedTensor } from '../../contract/weight-source.ts'

/** Longest time of slices before other callbacks run, apart from the last slice. */
const SLICE_MS = 0.25

/** Parses the tensors of a header without blocking the event loop. See `parseHeaderInSlices`. */
export async function parseTensors (
  json: Uint8Array,
  fileBytes: number | null,
  file: string
): Promise<SafetensorsTensor[]> {
  return (await inSlices(parseHeaderInSlices(json, fileBytes, file))).tensors
}

/** Runs a generator of slices of work, and returns its result. Other callbacks run once they have taken SLICE_MS. */
export async function inSlices<T> (steps: Generator<undefined, T, undefined>): Promise<T> {
  for (let until = performance.now() + SLICE_MS;;) {
    const { done, value } = steps.next()
    const isLate = performance.now() >= until
    if (isLate) await breathe()
    if (done === true) return value
    if (isLate) until = performance.now() + SLICE_MS
  }
}

/**
 * Throws CHECKPOINT_FORMAT for a dtype that refit does not read. `base`: the position of the file's byte 0 in its
 * source.
 */
export function announce (
  { name, dtype, shape, begin }: SafetensorsTensor,
  source: number,
  file: string,
  base = 0
): AnnouncedTensor {
  const type = toDType(dtype)
  if (type === undefined) throw formatError(file, describeUnreadName(dtype), name)
  return { name, dtype: type, shape, source, offset: base + begin }
}

/**
 * Every tensor that the index maps must be in the file that it names. Tensors that the index leaves out are read too,
 * as in transformers.
 */
export function checkIndex (
  index: { label: string, weightMap: ReadonlyMap<string, string> },
  homeOf: (tensor: string) => string | undefined
): void {
  for (const [name, expected] of index.weightMap) {
    const home = homeOf(name)
    if (home === expected) continue
    throw formatError(
      index.label,
      `should be in ${expected}, but ${home === undefined ? 'no file has it' : `is in ${home}`}`,
      name
    )
  }
}
