import { torchItemBytes, TORCH_DTYPES } from './dtypes.ts'

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

/** Bytes of an element that is sent, also of dtypes that no payload may carry. */
const OTHER_BYTES: ReadonlyMap<string, number> = new Map([
  ['float8_e4m3fn', 1],
  ['float8_e4m3fnuz', 1],
  ['float8_e5m2', 1],
  ['float8_e5m2fnuz', 1],
  ['float8_e8m0fnu', 1],
  ['float4_e2m1fn_x2', 1],
  ['complex32', 4],
  ['complex64', 8],
  ['complex128', 16]
])

/**
 * The canonical name and the bytes of an element; undefined for a text that is no dtype, or a dtype that tensors are
 * not sent in.
 */
export function readDTypeText (text: string): { name: string, bytes: number } | undefined {
  const bare = text.replace(/^torch\./, '')
  const name = ALIASES.get(bare) ?? bare
  if (!TORCH_DTYPES.includes(name)) return undefined
  const bytes = torchItemBytes(name) ?? OTHER_BYTES.get(name)
  return bytes === undefined ? undefined : { name, bytes }
}
