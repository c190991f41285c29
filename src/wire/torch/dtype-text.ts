import { bytesOf, isElementType } from '../../native/dtypes.ts'
import { TORCH_DTYPES } from './dtypes.ts'

// torch's dtypes as trainers write them into JSON: an attribute of the module, with or without `torch.` before it.

const ALIASES: ReadonlyMap<string, string> = new Map([
  ['half', 'float16'],
  ['float', 'float32'],
  ['double', 'float64'],
  ['short', 'int16'],
  ['int', 'int32'],
  ['long', 'int64'],
  ['chalf', 'complex32'],
  ['cfloat', 'complex64'],
  ['cdouble', 'complex128']
])

/**
 * The canonical name and the bytes of an element; undefined for a text that is no dtype, or a dtype that tensors are
 * not sent in.
 */
export function readDTypeText (text: string): { name: string, bytes: number } | undefined {
  const bare = text.replace(/^torch\./, '')
  const name = ALIASES.get(bare) ?? bare
  return TORCH_DTYPES.includes(name) && isElementType(name) ? { name, bytes: bytesOf(name) } : undefined
}
