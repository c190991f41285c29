import { bytesOf, ELEMENTS, isElementType } from '../../native/dtypes.ts'

// torch's dtypes as trainers write them into JSON: an attribute of the module, with or without `torch.` before it.

const ALIASES: ReadonlyMap<string, string> = new Map(
  ELEMENTS.flatMap(([name, { alias }]) => alias === undefined ? [] : [[alias, name]])
)

/**
 * The canonical name and the bytes of an element; undefined for a text that is no dtype, or a dtype that tensors are
 * not sent in.
 */
export function readDTypeText (text: string): { name: string, bytes: number } | undefined {
  const bare = text.replace(/^torch\./, '')
  const name = ALIASES.get(bare) ?? bare
  return isElementType(name) ? { name, bytes: bytesOf(name) } : undefined
}
