import { ELEMENTS, isDType, listDTypes } from '../../native/dtypes.ts'
import type { DType } from '../../native/dtypes.ts'

// torch's dtypes, by their names in a pickle (always the canonical one: `bfloat16`, never `half`).

/** Bytes of the dtypes that a payload may carry. */
const BYTES: ReadonlyMap<string, number> = new Map(
  ELEMENTS.filter(([, { use }]) => use === 'weight' || use === 'data').map(([name, { bytes }]) => [name, bytes])
)

/** Known by name, and refused. */
const QUANTISED: ReadonlySet<string> = new Set([
  ...ELEMENTS.filter(([, { use }]) => use === 'quantised').map(([name]) => name),
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
const COMPLEX: ReadonlySet<string> = new Set(
  ELEMENTS.filter(([, { use }]) => use === 'complex').map(([name]) => name)
)

/** Classes of torch before 2.0 whose names are the dtypes of storages. */
const STORAGES: ReadonlyMap<string, string> = new Map(
  ELEMENTS.flatMap(([name, { storage }]) => storage === undefined ? [] : [[storage, name]])
)

export const TORCH_DTYPES: readonly string[] = [...BYTES.keys(), ...QUANTISED, ...COMPLEX]
export const TORCH_STORAGES: readonly string[] = [...STORAGES.keys()]

/** Bytes of an element, or undefined for a dtype that payloads may not carry. */
export function torchItemBytes (name: string): number | undefined {
  return BYTES.get(name)
}

/** refit's dtype for a weight of a torch dtype; undefined if refit has none. */
export function torchWeightDType (name: string): DType | undefined {
  return isDType(name) ? name : undefined
}

export function torchStorageDType (storageClass: string): string | undefined {
  return STORAGES.get(storageClass)
}

/** The reason why a dtype is refused, and what to do. */
export function describeUnreadDType (name: string): string {
  const taken = `refit takes ${listDTypes()}`
  if (QUANTISED.has(name)) {
    return `dtype ${name} is a quantised one; ${taken}: send the weights before they are quantised, or dequantise them`
  }
  if (COMPLEX.has(name)) return `dtype ${name} is complex; ${taken}`
  return `dtype ${name} is not one of weights; ${taken}`
}
