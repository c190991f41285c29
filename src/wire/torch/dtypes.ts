import { bytesOf, DTYPES } from '../../native/dtypes.ts'
import type { DType, ElementType } from '../../native/dtypes.ts'

// torch's dtypes, by their names in a pickle (always the canonical one: `bfloat16`, never `half`).

/** Dtypes that a payload may carry: three are for weights, the others for bytes, indices and masks. */
const CARRIED: readonly ElementType[] = [
  'bfloat16',
  'float16',
  'float32',
  'float64',
  'uint8',
  'int8',
  'bool',
  'int16',
  'uint16',
  'int32',
  'uint32',
  'int64',
  'uint64'
]
const BYTES: ReadonlyMap<string, number> = new Map(CARRIED.map(name => [name, bytesOf(name)]))

/** Known by name, and refused. */
const QUANTISED = new Set([
  'float8_e4m3fn',
  'float8_e4m3fnuz',
  'float8_e5m2',
  'float8_e5m2fnuz',
  'float8_e8m0fnu',
  'float4_e2m1fn_x2',
  'qint8',
  'quint8',
  'qint32',
  'quint4x2',
  'quint2x4',
  'bits1x8',
  'bits2x4',
  'bits4x2',
  'bits8',
  'bits16',
  'int1',
  'int2',
  'int3',
  'int4',
  'int5',
  'int6',
  'int7',
  'uint1',
  'uint2',
  'uint3',
  'uint4',
  'uint5',
  'uint6',
  'uint7'
])
const COMPLEX = new Set(['complex32', 'complex64', 'complex128'])

/** Classes of torch before 2.0 whose names are the dtypes of storages. */
const STORAGES: ReadonlyMap<string, string> = new Map([
  ['BFloat16Storage', 'bfloat16'],
  ['HalfStorage', 'float16'],
  ['FloatStorage', 'float32'],
  ['DoubleStorage', 'float64'],
  ['ByteStorage', 'uint8'],
  ['CharStorage', 'int8'],
  ['BoolStorage', 'bool'],
  ['ShortStorage', 'int16'],
  ['IntStorage', 'int32'],
  ['LongStorage', 'int64']
])

export const TORCH_DTYPES: readonly string[] = [...CARRIED, ...QUANTISED, ...COMPLEX]
export const TORCH_STORAGES: readonly string[] = [...STORAGES.keys()]

/** Bytes of an element, or undefined for a dtype that payloads may not carry. */
export function torchItemBytes (name: string): number | undefined {
  return BYTES.get(name)
}

/** refit's dtype for a weight of a torch dtype; undefined if refit has none. */
export function torchWeightDType (name: string): DType | undefined {
  return Object.hasOwn(DTYPES, name) ? name as DType : undefined
}

export function torchStorageDType (storageClass: string): string | undefined {
  return STORAGES.get(storageClass)
}

/** The reason why a dtype is refused, and what to do. */
export function describeUnreadDType (name: string): string {
  const taken = 'refit takes bfloat16, float16 and float32'
  if (QUANTISED.has(name)) {
    return `dtype ${name} is a quantised one; ${taken}: send the weights before they are quantised, or dequantise them`
  }
  if (COMPLEX.has(name)) return `dtype ${name} is complex; ${taken}`
  return `dtype ${name} is not one of weights; ${taken}`
}
