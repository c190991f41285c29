import type { HeldAdapter } from '../contract/adapters.ts'
import { bytesOf } from '../native/dtypes.ts'
import type { HeldDType } from '../native/dtypes.ts'
import type { SlotContent } from './slot-memory.ts'

// A version that is read from its slot, in PEFT's format: experts one by one, in the engine's dtype.

/** PEFT's prefix of every name. */
const PREFIX = 'base_model.model.'
/** Number of an expert in a name. Experts of a layer share rank and scale, so one pattern is enough for all. */
const EXPERT = /\.experts\.\d+\./

/** An adapter_config.json. alpha / r is each module's scale, so use_rslora is not needed. */
export function heldConfig ({ modules }: SlotContent): object {
  const shapes = new Map<string, { rank: number, alpha: number, count: number }>()
  for (const { rank, scale } of modules) {
    const key = `${rank} ${scale}`
    const shape = shapes.get(key) ?? { rank, alpha: scale * rank, count: 0 }
    shape.count++
    shapes.set(key, shape)
  }
  const usual = [...shapes.values()].sort((a, b) => b.count - a.count)[0]!
  const rankPattern: Record<string, number> = {}
  const alphaPattern: Record<string, number> = {}
  for (const { module: { name }, rank, scale } of modules) {
    const pattern = name.replace(EXPERT, '.experts.\\d+.')
    const alpha = scale * rank
    if (rank !== usual.rank) rankPattern[pattern] = rank
    if (alpha !== usual.alpha) alphaPattern[pattern] = alpha
  }
  return {
    peft_type: 'LORA',
    r: usual.rank,
    lora_alpha: usual.alpha,
    target_modules: [...new Set(modules.map(({ module }) => module.target))].sort(),
    rank_pattern: rankPattern,
    alpha_pattern: alphaPattern
  }
}

/** The tensors in the order of `heldBytes`. */
export function heldTensors ({ modules }: SlotContent, dtype: HeldDType): HeldAdapter['tensors'] {
  return modules.flatMap(({ module: { name, target, inSize, outSize }, rank }) => {
    const [a, b] = target === 'embed_tokens'
      ? ['lora_embedding_A', 'lora_embedding_B']
      : ['lora_A.weight', 'lora_B.weight']
    return [
      { name: `${PREFIX}${name}.${a}`, dtype, shape: [rank, inSize] },
      { name: `${PREFIX}${name}.${b}`, dtype, shape: [outSize, rank] }
    ]
  })
}

/** `tensors`: A and B of each module as SlotMemory.tensors reads them. */
export async function* heldBytes (
  { modules }: SlotContent,
  tensors: AsyncIterable<Uint8Array>,
  dtype: HeldDType
): AsyncGenerator<Uint8Array, void, undefined> {
  let index = 0
  for await (const bytes of tensors) {
    const { module: { target, inSize }, rank } = modules[index >> 1]!
    const isEmbeddingA = index++ % 2 === 0 && target === 'embed_tokens'
    yield isEmbeddingA ? transposed(bytes, inSize, rank, bytesOf(dtype)) : bytes
  }
}

function transposed (bytes: Uint8Array, rows: number, cols: number, size: number): Uint8Array {
  const Elements = size === 2 ? Uint16Array : Uint32Array
  const from = new Elements(bytes.buffer as ArrayBuffer, bytes.byteOffset, rows * cols)
  const to = new Elements(rows * cols)
  for (let row = 0; row < rows; row++) {
    for (let col = 0; col < cols; col++) to[col * rows + row] = from[row * cols + col]!
  }
  return new Uint8Array(to.buffer)
}
