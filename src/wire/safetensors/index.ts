import { atOnce, ENTRIES_PER_SLICE, formatError, MAX_TENSORS } from './header.ts'
import { clip, JsonSyntaxError, StrictJson } from '../strict-json.ts'

/** The name that transformers gives to the index of a sharded checkpoint. */
export const INDEX_NAME = 'model.safetensors.index.json'
/** The name that it gives to a checkpoint in one file. */
export const SINGLE_NAME = 'model.safetensors'
/** Files of one checkpoint. Each stays open until its update has ended. */
export const MAX_FILES = 4096
const MAX_FILE_NAME = 255
const SUFFIX = '.safetensors'

export interface SafetensorsIndex {
  /** Tensor name to file name. */
  weightMap: Map<string, string>
  /** File names without duplicates, in alphabetical order. */
  files: string[]
}

/**
 * Parses an index. File names must be plain names in the index's own folder. Throws CHECKPOINT_FORMAT; messages call
 * the index `file`.
 */
export function parseIndex (json: Uint8Array, file: string): SafetensorsIndex {
  return atOnce(parseIndexInSlices(json, file))
}

/** Like `parseIndex`, but pauses every few thousand tensors. */
export function* parseIndexInSlices (
  json: Uint8Array,
  file: string
): Generator<undefined, SafetensorsIndex, undefined> {
  const reader = new StrictJson(json)
  let weightMap: Map<string, string> | undefined
  try {
    for (const key of reader.entries()) {
      // `metadata` (total_size and the like) is only informative: it is checked as JSON and left out.
      if (key === 'weight_map') weightMap = yield* readWeightMap(reader, file)
      else reader.skip()
    }
    if (reader.peek() !== -1) throw reader.fail('text after the end')
  } catch (error) {
    if (error instanceof JsonSyntaxError) throw formatError(file, `bad index: ${error.message}`)
    throw error
  }
  if (weightMap === undefined) throw formatError(file, 'has no weight_map')
  if (weightMap.size === 0) throw formatError(file, 'its weight_map is empty')
  return { weightMap, files: [...new Set(weightMap.values())].sort() }
}

function* readWeightMap (
  reader: StrictJson,
  file: string
): Generator<undefined, Map<string, string>, undefined> {
  const names = new Map<string, string>()
  const map = new Map<string, string>()
  for (const tensor of reader.entries()) {
    if (map.size === MAX_TENSORS) throw formatError(file, `more than ${MAX_TENSORS} tensors`)
    const name = reader.string()
    // All equal file names become one string, so that the copies can be freed.
    let known = names.get(name)
    if (known === undefined) {
      checkFileName(name, tensor, file)
      if (names.size === MAX_FILES) throw formatError(file, `more than ${MAX_FILES} files`)
      names.set(name, known = name)
    }
    map.set(tensor, known)
    if (map.size % ENTRIES_PER_SLICE === 0) yield
  }
  return map
}

function checkFileName (name: string, tensor: string, file: string): void {
  // eslint-disable-next-line no-control-regex
  const plain = name !== '' && name.length <= MAX_FILE_NAME && !/[/\\\0-\x1f]/.test(name) && !name.startsWith('.')
  if (!plain) {
    throw formatError(
      file,
      `the file name ${JSON.stringify(clip(name))} is not a plain name beside the index`,
      tensor
    )
  }
  if (!name.endsWith(SUFFIX)) {
    throw formatError(
      file,
      `the file ${JSON.stringify(name)} is not ${SUFFIX}; refit reads safetensors only`,
      tensor
    )
  }
}
