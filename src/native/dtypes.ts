/** Dtypes in which weights may be stored; the numbers are the addon's (native/core/dtype.h). */
export const DTYPES = { bfloat16: 0, float16: 1, float32: 2 } as const
export type DType = keyof typeof DTYPES

const NAMES = Object.keys(DTYPES) as DType[]

/** The dtype with one of the addon's numbers. */
export function dtypeOf (number: number): DType {
  return NAMES[number]!
}

/**
 * Bytes of one element, under torch's names: dtypes of weights, and others that payloads carry or that trainers and
 * checkpoints name.
 */
const ELEMENT_BYTES = {
  bfloat16: 2,
  float16: 2,
  float32: 4,
  float64: 8,
  uint8: 1,
  int8: 1,
  bool: 1,
  int16: 2,
  uint16: 2,
  int32: 4,
  uint32: 4,
  int64: 8,
  uint64: 8,
  complex32: 4,
  complex64: 8,
  complex128: 16,
  float8_e4m3fn: 1,
  float8_e4m3fnuz: 1,
  float8_e5m2: 1,
  float8_e5m2fnuz: 1,
  float8_e8m0fnu: 1,
  // Two values of 4 bits.
  float4_e2m1fn_x2: 1
} as const
export type ElementType = keyof typeof ELEMENT_BYTES

export function isElementType (name: string): name is ElementType {
  return Object.hasOwn(ELEMENT_BYTES, name)
}

/** Bytes of one element. No other place in TypeScript knows the size of a dtype. */
export function bytesOf (dtype: ElementType): number {
  return ELEMENT_BYTES[dtype]
}
