import { bytesOf } from '../../native/dtypes.ts'
import type { DType, ElementType } from '../../native/dtypes.ts'

/** The format's dtypes whose elements take whole bytes, by torch's names. */
const ELEMENTS: ReadonlyArray<readonly [string, ElementType]> = [
  ['BOOL', 'bool'],
  ['U8', 'uint8'],
  ['I8', 'int8'],
  ['F8_E5M2', 'float8_e5m2'],
  ['F8_E4M3', 'float8_e4m3fn'],
  ['F8_E8M0', 'float8_e8m0fnu'],
  ['F8_E4M3FNUZ', 'float8_e4m3fnuz'],
  ['F8_E5M2FNUZ', 'float8_e5m2fnuz'],
  ['I16', 'int16'],
  ['U16', 'uint16'],
  ['F16', 'float16'],
  ['BF16', 'bfloat16'],
  ['I32', 'int32'],
  ['U32', 'uint32'],
  ['F32', 'float32'],
  ['C64', 'complex64'],
  ['F64', 'float64'],
  ['I64', 'int64'],
  ['U64', 'uint64']
]

/** Every dtype of the format (safetensors 0.8) and the bits of one element; refit reads three of them. */
export const SAFETENSORS_BITS: ReadonlyMap<string, number> = new Map([
  ['F4', 4],
  ['F6_E2M3', 6],
  ['F6_E3M2', 6],
  ...ELEMENTS.map(([name, type]) => [name, 8 * bytesOf(type)] as const)
])

const READ = new Map<string, DType>([['F16', 'float16'], ['BF16', 'bfloat16'], ['F32', 'float32']])

export const SAFETENSORS_NAMES: Record<DType, string> = { bfloat16: 'BF16', float16: 'F16', float32: 'F32' }

/** refit's dtype for a name of the format; undefined for a dtype that refit does not read. */
export function toDType (name: string): DType | undefined {
  return READ.get(name)
}
