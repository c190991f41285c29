import { readdirSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import { packageRoot } from '../../src/root.ts'
import { decodeValues } from './dtype-values.ts'

/** The folder of make.py's models. */
export const goldenRoot = join(packageRoot, 'test/goldens')
export const goldenNames = readdirSync(goldenRoot, { withFileTypes: true }).filter(entry => entry.isDirectory()).map(
  entry => entry.name
)

export interface GoldenCase {
  prompt: number[]
  positions: number[]
  /** [positions][vocab] computed in float32 and in bfloat16. */
  fp32: Float64Array[]
  bf16: Float64Array[]
  greedy: number[]
  gaps: number[]
  /** Logprobs of tokens 1.. of prompt + greedy. */
  logprobs: { '1.0': number[], 0.7: number[] }
  /**
   * Mixtures of experts: [tokens of prompt + greedy, sparse layers, experts per token], best first, computed in
   * float32.
   */
  experts?: Uint8Array
}

export interface Golden {
  folder: string
  rope: { invFreq: Float64Array, scale: number }
  cases: GoldenCase[]
}

/** The results of transformers for one golden model (test/goldens/make.py). */
export function readGolden (name: string): Golden {
  const folder = join(goldenRoot, name)
  const { rope, cases } = JSON.parse(readFileSync(join(folder, 'golden.json'), 'utf8'))
  return {
    folder,
    rope: { invFreq: decodeValues('float32', Buffer.from(rope.inv_freq, 'base64')), scale: rope.scale },
    cases: cases.map((
      { logits, bf16, experts, ...rest }: { logits: string, bf16: string, experts?: string, positions: number[] }
    ) => ({
      ...rest,
      ...experts === undefined ? {} : { experts: Uint8Array.from(Buffer.from(experts, 'base64')) },
      fp32: rowsOf(decodeValues('float32', Buffer.from(logits, 'base64')), rest.positions.length),
      bf16: rowsOf(decodeValues('bfloat16', Buffer.from(bf16, 'base64')), rest.positions.length)
    }))
  }
}

function rowsOf (flat: Float64Array, rows: number): Float64Array[] {
  const cols = flat.length / rows
  return Array.from({ length: rows }, (_, i) => flat.subarray(i * cols, (i + 1) * cols))
}
