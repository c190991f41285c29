import type { DType } from '../../native/addon.ts'

/** Every dtype of the format and its bits (safetensors 0.8); refit reads three of them. */
export const SAFETENSORS_BITS: ReadonlyMap<string, number> = new Map([
  ['BOOL', 8],
  ['F4', 4],
  ['F6_E2M3', 6],
  ['F6_E3M2', 6],
  ['U8', 8],
  ['I8', 8],
  ['F8_E5M2', 8],
  ['F8_E4M3', 8],
  ['F8_E8M0', 8],
  ['F8_E4M3FNUZ', 8],
  ['F8_E5M2FNUZ', 8],
  ['I16', 16],
  ['U16', 16],
  ['F16', 16],
  ['BF16', 16],
  ['I32', 32],
  ['U32', 32],
  ['F32', 32],
  ['C64', 64],
  ['F64', 64],
  ['I64', 64],
  ['U64', 64]
])

const READ = new Map<string, DType>([['BF16', 'bfloat16'], ['F16', 'float16'], ['F32', 'float32']])

export const SAFETENSORS_NAMES: Record<DType, string> = { bfloat16: 'BF16', float16: 'F16', float32: 'F32' }

/** refit's dtype for one of the format, undefined where refit does not read it. */
export function toDType (name: string): DType | undefined {
  return READ.get(name)
}
