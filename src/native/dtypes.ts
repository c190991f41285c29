interface Common {
  readonly bytes: number
  /** Class of torch before 2.0 that names the dtype of its storages. */
  readonly storage?: string
  /** torch's other name for it. */
  readonly alias?: string
}

interface WeightElement extends Common {
  readonly use: 'weight'
  /** Its name in safetensors. */
  readonly safetensors: string
  /** Engines hold parameters in it. Every dtype of weights converts to each of these. */
  readonly held?: true
}

interface OtherElement extends Common {
  /** `data`: payloads carry it for bytes, indices and masks. The others are known by name and refused. */
  readonly use: 'data' | 'quantised' | 'complex'
  readonly safetensors?: string
}

/**
 * Dtypes whose elements take whole bytes, under torch's names. All other lists of dtypes derive from this one. Dtypes
 * of weights are in the order of kFormats in native/core/dtype.h; a test compares them.
 */
const TABLE = {
  bfloat16: { use: 'weight', bytes: 2, safetensors: 'BF16', storage: 'BFloat16Storage', held: true },
  float16: { use: 'weight', bytes: 2, safetensors: 'F16', storage: 'HalfStorage', alias: 'half', held: true },
  float32: { use: 'weight', bytes: 4, safetensors: 'F32', storage: 'FloatStorage', alias: 'float', held: true },
  float64: { use: 'data', bytes: 8, safetensors: 'F64', storage: 'DoubleStorage', alias: 'double' },
  uint8: { use: 'data', bytes: 1, safetensors: 'U8', storage: 'ByteStorage' },
  int8: { use: 'data', bytes: 1, safetensors: 'I8', storage: 'CharStorage' },
  bool: { use: 'data', bytes: 1, safetensors: 'BOOL', storage: 'BoolStorage' },
  int16: { use: 'data', bytes: 2, safetensors: 'I16', storage: 'ShortStorage', alias: 'short' },
  uint16: { use: 'data', bytes: 2, safetensors: 'U16' },
  int32: { use: 'data', bytes: 4, safetensors: 'I32', storage: 'IntStorage', alias: 'int' },
  uint32: { use: 'data', bytes: 4, safetensors: 'U32' },
  int64: { use: 'data', bytes: 8, safetensors: 'I64', storage: 'LongStorage', alias: 'long' },
  uint64: { use: 'data', bytes: 8, safetensors: 'U64' },
  complex32: { use: 'complex', bytes: 4, alias: 'chalf' },
  complex64: { use: 'complex', bytes: 8, safetensors: 'C64', alias: 'cfloat' },
  complex128: { use: 'complex', bytes: 16, alias: 'cdouble' },
  float8_e4m3fn: { use: 'quantised', bytes: 1, safetensors: 'F8_E4M3' },
  float8_e4m3fnuz: { use: 'quantised', bytes: 1, safetensors: 'F8_E4M3FNUZ' },
  float8_e5m2: { use: 'quantised', bytes: 1, safetensors: 'F8_E5M2' },
  float8_e5m2fnuz: { use: 'quantised', bytes: 1, safetensors: 'F8_E5M2FNUZ' },
  float8_e8m0fnu: { use: 'quantised', bytes: 1, safetensors: 'F8_E8M0' },
  // Two values of 4 bits.
  float4_e2m1fn_x2: { use: 'quantised', bytes: 1 }
} as const satisfies Record<string, WeightElement | OtherElement>

export type ElementType = keyof typeof TABLE
type With<Field> = { [Name in ElementType]: (typeof TABLE)[Name] extends Field ? Name : never }[ElementType]
/** Dtypes in which weights may be stored and sent. */
export type DType = With<{ use: 'weight' }>
/** Dtypes in which engines hold parameters. */
export type HeldDType = With<{ held: true }>

/** The table's rows. */
export const ELEMENTS = Object.entries(TABLE) as ReadonlyArray<
  { [Name in ElementType]: readonly [Name, WeightElement | OtherElement] }[ElementType]
>

const NAMES = ELEMENTS.filter(([, { use }]) => use === 'weight').map(([name]) => name as DType)

/** The addon's numbers of the dtypes of weights (DType in native/core/dtype.h). */
export const DTYPES = Object.fromEntries(NAMES.map((name, index) => [name, index])) as Readonly<Record<DType, number>>

/** The dtype with one of the addon's numbers. */
export function dtypeOf (number: number): DType {
  return NAMES[number]!
}

export function isDType (name: string): name is DType {
  return Object.hasOwn(DTYPES, name)
}

export function isHeld (name: string): name is HeldDType {
  return isElementType(name) && 'held' in TABLE[name]
}

export function isElementType (name: string): name is ElementType {
  return Object.hasOwn(TABLE, name)
}

/** Bytes of one element. No other place in TypeScript knows the size of a dtype. */
export function bytesOf (dtype: ElementType): number {
  return TABLE[dtype].bytes
}

/** Dtypes of weights for messages: "bfloat16, float16 and float32", or under the names that `nameOf` gives them. */
export function listDTypes (nameOf: (dtype: DType) => string = name => name): string {
  const names = NAMES.map(nameOf)
  return `${names.slice(0, -1).join(', ')} and ${names.at(-1)!}`
}
