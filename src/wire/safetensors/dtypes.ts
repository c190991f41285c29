import { ELEMENTS, isDType, listDTypes } from '../../native/dtypes.ts'
import type { DType } from '../../native/dtypes.ts'

/** The format's dtypes whose elements take whole bytes. */
const NAMED = ELEMENTS.flatMap(([type, { safetensors: name, bytes }]) =>
  name === undefined ? [] : [{ name, type, bits: 8 * bytes }]
)
const WEIGHTS = NAMED.flatMap(({ name, type }) => isDType(type) ? [{ name, type }] : [])

/** Every dtype of the format (safetensors 0.8) and the bits of one element. */
export const SAFETENSORS_BITS: ReadonlyMap<string, number> = new Map([
  ['F4', 4],
  ['F6_E2M3', 6],
  ['F6_E3M2', 6],
  ...NAMED.map(({ name, bits }) => [name, bits] as const)
])

const READ: ReadonlyMap<string, DType> = new Map(WEIGHTS.map(({ name, type }) => [name, type]))

export const SAFETENSORS_NAMES = Object.fromEntries(
  WEIGHTS.map(({ name, type }) => [type, name])
) as Readonly<Record<DType, string>>

/** refit's dtype for a name of the format; undefined for a dtype that refit does not read. */
export function toDType (name: string): DType | undefined {
  return READ.get(name)
}

/** The reason why a dtype is refused. */
export function describeUnreadName (name: string): string {
  return `dtype ${name} is not supported; refit reads ${listDTypes(type => SAFETENSORS_NAMES[type])}`
}
