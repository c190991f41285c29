import type { Architecture, ModelTable } from '../../src/model/architecture.ts'
import { ADAPTER_TARGETS, slotRank } from '../../src/model/adapter-slots.ts'
import type { AdapterTarget } from '../../src/model/adapter-slots.ts'
import { buildModelTable } from '../../src/model/model-table.ts'
import type { AnnouncedTensor, StoredSource } from '../../src/contract/weight-source.ts'
import { checkpointTensors, randomValues } from './make-checkpoint.ts'
import type { CheckpointTensor } from './make-checkpoint.ts'
import { MEMORY } from './memory-source.ts'

/** An adapter in float32: A and B of each module, and its scale. */
export interface TestAdapter {
  config: Record<string, unknown>
  modules: Map<
    string,
    { a: Float32Array, b: Float32Array, rank: number, scale: number, inSize: number, outSize: number }
  >
}

export interface AdapterShape {
  rank: number
  alpha?: number
  useRslora?: boolean
  targets?: readonly AdapterTarget[]
  /** Adapters of different variants have different values. */
  variant: number
  /** Only some modules; default all. */
  only?: (module: string) => boolean
  /** B is zero, as in a new adapter. */
  zeroB?: boolean
  /** Size of the values of B. */
  size?: number
}

/** A random adapter of a model whose engine takes all targets. */
export function testAdapter (arch: Architecture, shape: AdapterShape): TestAdapter {
  const { rank, alpha = 2 * rank, useRslora = false, targets = ADAPTER_TARGETS, variant, only = () => true } = shape
  const random = randomValues(variant * 77 + 5)
  const { modules } = adapterTable(arch, 1, rank, targets).adapters!
  const made: TestAdapter['modules'] = new Map()
  for (const { name, inSize, outSize } of modules.values()) {
    if (!only(name)) continue
    const a = Float32Array.from({ length: rank * inSize }, (_, i) => random(`${name}.a`, i))
    const b = Float32Array.from(
      { length: outSize * rank },
      (_, i) => shape.zeroB === true ? 0 : (shape.size ?? 1) * random(`${name}.b`, i)
    )
    made.set(name, { a, b, rank, scale: useRslora ? alpha / Math.sqrt(rank) : alpha / rank, inSize, outSize })
  }
  const suffixes = [...new Set([...made.keys()].map(name => name.split('.').at(-1)!))]
  return {
    config: { peft_type: 'LORA', r: rank, lora_alpha: alpha, use_rslora: useRslora, target_modules: suffixes },
    modules: made
  }
}

/** The table of an engine with three slots for adapters of this rank. */
export function adapterTable (
  arch: Architecture,
  ranks: number,
  rank: number,
  targets: readonly AdapterTarget[] = ADAPTER_TARGETS
): ModelTable {
  return buildModelTable(arch, ranks, 'float32', { slots: 3, rank: slotRank(rank), targets: new Set(targets) })
}

/** Its tensors under PEFT's names. */
export function peftTensors ({ modules }: TestAdapter): CheckpointTensor[] {
  return [...modules].flatMap(([name, { a, b, rank, inSize, outSize }]) => {
    const tensor = (end: string, shape: number[], data: Float32Array): CheckpointTensor => ({
      name: `base_model.model.${name}.${end}`,
      dtype: 'float32',
      shape,
      data: Buffer.from(data.buffer)
    })
    return name.endsWith('embed_tokens')
      ? [tensor('lora_embedding_A', [rank, inSize], a), tensor('lora_embedding_B', [outSize, rank], b)]
      : [tensor('lora_A.weight', [rank, inSize], a), tensor('lora_B.weight', [outSize, rank], b)]
  })
}

/**
 * Its tensors as PEFT names them if experts are fused (transformers 5): one A and one B of all experts of a layer. Gate
 * and up share A, so up gets the A of gate first.
 */
export function fusedTensors ({ config, modules }: TestAdapter): CheckpointTensor[] {
  const others = new Map([...modules].filter(([name]) => !name.includes('.experts.')))
  const layers = new Set([...modules.keys()].flatMap(name => /^(.+\.experts)\.\d+\./.exec(name)?.[1] ?? []))
  const fused = [...layers].flatMap(layer => {
    const all = (part: string) => [...modules].filter(([name]) => name.startsWith(`${layer}.`) && name.endsWith(part))
    const [gate, up, down] = ['gate_proj', 'up_proj', 'down_proj'].map(part => all(part).map(([, module]) => module))
    for (const [e, module] of up!.entries()) module.a.set(gate![e]!.a)
    return [...fuse(`${layer}.base_layer`, gate!, [gate!, up!]), ...fuse(layer, down!, [down!])]
  })
  return [...peftTensors({ config, modules: others }), ...fused]
}

type Module = TestAdapter['modules'] extends Map<string, infer M> ? M : never

/** A [E r, in], expert slow; B [out, r E], expert fast, of the parts one below another. */
function fuse (name: string, a: readonly Module[], parts: readonly (readonly Module[])[]): CheckpointTensor[] {
  const { rank, inSize } = a[0]!
  const experts = a.length
  const outSize = parts.reduce((sum, [first]) => sum + first!.outSize, 0)
  const whole = new Float32Array(outSize * rank * experts)
  let row = 0
  for (const part of parts) {
    for (let o = 0; o < part[0]!.outSize; o++, row++) {
      for (const [e, { b }] of part.entries()) {
        for (let r = 0; r < rank; r++) whole[(row * rank + r) * experts + e] = b[o * rank + r]!
      }
    }
  }
  const tensor = (half: string, shape: number[], data: Buffer): CheckpointTensor => ({
    name: `base_model.model.${name}.lora_${half}.weight`,
    dtype: 'float32',
    shape,
    data
  })
  return [
    tensor('A', [experts * rank, inSize], Buffer.concat(a.map(({ a }) => Buffer.from(a.buffer)))),
    tensor('B', [outSize, rank * experts], Buffer.from(whole.buffer))
  ]
}

/** A source with tensors in one buffer. */
export function tensorSource (tensors: readonly CheckpointTensor[]): StoredSource {
  const announced: AnnouncedTensor[] = []
  let offset = 1
  for (const { name, dtype, shape, data } of tensors) {
    announced.push({ name, dtype, shape, source: 0, offset })
    offset += data.length
  }
  return {
    kind: 'stored',
    transport: MEMORY,
    tensors: announced,
    sources: [{ buffer: Buffer.concat([Buffer.alloc(1), ...tensors.map(({ data }) => data)]) }],
    verify: async () => {},
    close: async () => {}
  }
}

/** The base model's float32 tensors with adapters merged into them: W + scale * B A. */
export function mergedTensors (arch: Architecture, { modules }: TestAdapter): CheckpointTensor[] {
  const tensors = checkpointTensors(arch, { dtype: 'float32' })
  for (const { name, data } of tensors) {
    const adapter = modules.get(name.replace(/\.weight$/, ''))
    if (adapter === undefined) continue
    const { a, b, rank, scale, inSize, outSize } = adapter
    const weight = new Float32Array(data.buffer, data.byteOffset, data.length / 4)
    const isEmbedding = name.includes('embed_tokens')
    for (let o = 0; o < outSize; o++) {
      for (let i = 0; i < inSize; i++) {
        let sum = 0
        for (let r = 0; r < rank; r++) sum += b[o * rank + r]! * a[r * inSize + i]!
        // An embedding's weight is [vocabulary, hidden].
        weight[isEmbedding ? i * outSize + o : o * inSize + i]! += scale * sum
      }
    }
  }
  return tensors
}
