import type { ModelTable, Param, TensorEntry } from './architecture.ts'

// The parameters of a rank as SGLang names and shapes them (`named_parameters()` of its models): what `load_format` "direct" brings.

const WHOLE: Record<string, string> = {
  embed: 'model.embed_tokens.weight',
  norm: 'model.norm.weight',
  lm_head: 'lm_head.weight'
}
const IN_LAYER: Record<string, string> = {
  ln1: 'input_layernorm.weight',
  qkv: 'self_attn.qkv_proj.weight',
  qkv_bias: 'self_attn.qkv_proj.bias',
  q_norm: 'self_attn.q_norm.weight',
  k_norm: 'self_attn.k_norm.weight',
  o: 'self_attn.o_proj.weight',
  o_bias: 'self_attn.o_proj.bias',
  ln2: 'post_attention_layernorm.weight',
  router: 'mlp.gate.weight',
  w13: 'mlp.experts.w13_weight',
  w2: 'mlp.experts.w2_weight',
  gate_up: 'mlp.gate_up_proj.weight',
  down: 'mlp.down_proj.weight'
}
const VECTORS = new Set(['norm', 'ln1', 'ln2', 'q_norm', 'k_norm', 'qkv_bias', 'o_bias'])
const known = new WeakMap<ModelTable, ReadonlyMap<string, TensorEntry>>()

/**
 * By SGLang's name, every parameter as a tensor that each rank takes whole, from one of its own. The shapes are those of one rank;
 * expert weights are [experts, rows, columns].
 */
export function engineTensors (table: ModelTable): ReadonlyMap<string, TensorEntry> {
  let tensors = known.get(table)
  if (tensors === undefined) {
    known.set(
      table,
      tensors = new Map(table.params.map((param, id) => toEntry(table, param, id)))
    )
  }
  return tensors
}

function toEntry (table: ModelTable, param: Param, id: number): [string, TensorEntry] {
  const [, layer, inner] = /^layers\.(\d+)\.(.+)$/.exec(param.name) ?? []
  const name = inner === undefined ? WHOLE[param.name]! : `model.layers.${layer}.${IN_LAYER[inner]!}`
  const rect = { param: id, srcRow: 0, srcCol: 0, rows: param.rows, cols: param.cols, dstRow: 0, dstCol: 0 }
  const rects = Array.from({ length: table.ranks }, (_, rank) => ({ rank, ...rect }))
  return [name, {
    name,
    shape: shapeOf(table, param, inner ?? param.name),
    rows: param.rows,
    cols: param.cols,
    rects,
    alternative: true
  }]
}

function shapeOf (table: ModelTable, { name, rows, cols }: Param, kind: string): number[] {
  if (VECTORS.has(kind)) return [rows]
  if (kind !== 'w13' && kind !== 'w2') return [rows, cols]
  const experts = table.params.find(param => param.name === name.replace(/w13$|w2$/, 'router'))!.rows
  return [experts, rows / experts, cols]
}
