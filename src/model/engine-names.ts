import type { ModelTable, Param, TensorEntry } from './architecture.ts'

// The parameters of a rank as SGLang names and shapes them (`named_parameters()` of its models), for `load_format`
// "direct".

/** Parameters that fuse several checkpoint tensors. The others have the name of their checkpoint tensor. */
const FUSED: Record<string, string> = {
  qkv: 'self_attn.qkv_proj.weight',
  qkv_bias: 'self_attn.qkv_proj.bias',
  w13: 'mlp.experts.w13_weight',
  w2: 'mlp.experts.w2_weight',
  gate_up: 'mlp.gate_up_proj.weight'
}
const known = new WeakMap<ModelTable, ReadonlyMap<string, TensorEntry>>()

/**
 * By SGLang's name, every parameter as a tensor that each rank takes whole, from one of its own. The shapes are those
 * of one rank; expert weights are [experts, rows, columns].
 */
export function engineTensors (table: ModelTable): ReadonlyMap<string, TensorEntry> {
  let tensors = known.get(table)
  if (tensors === undefined) {
    const names = checkpointNames(table)
    known.set(
      table,
      tensors = new Map(table.params.slice(0, table.weights).map((param, id) => toEntry(table, param, id, names)))
    )
  }
  return tensors
}

/** By parameter, the name of a checkpoint tensor in it: the only one, unless the parameter is fused. */
function checkpointNames (table: ModelTable): ReadonlyMap<number, string> {
  const names = new Map<number, string>()
  for (const { name, rects } of table.tensors.values()) names.set(rects[0]!.param, name)
  return names
}

function toEntry (
  table: ModelTable,
  param: Param,
  id: number,
  names: ReadonlyMap<number, string>
): [string, TensorEntry] {
  const [, layer, inner = ''] = /^layers\.(\d+)\.(.+)$/.exec(param.name) ?? []
  const fused = FUSED[inner]
  const name = fused === undefined ? names.get(id)! : `model.layers.${layer}.${fused}`
  const rect = { param: id, srcRow: 0, srcCol: 0, rows: param.rows, cols: param.cols, dstRow: 0, dstCol: 0 }
  const rects = Array.from({ length: table.ranks }, (_, rank) => ({ rank, ...rect }))
  return [name, {
    name,
    shape: shapeOf(table, param, inner),
    rows: param.rows,
    cols: param.cols,
    rects,
    dtype: param.dtype,
    alternative: true
  }]
}

function shapeOf (table: ModelTable, { name, rows, cols }: Param, kind: string): number[] {
  if (kind === 'w13' || kind === 'w2') {
    const experts = table.params.find(param => param.name === name.replace(/w13$|w2$/, 'router'))!.rows
    return [experts, rows / experts, cols]
  }
  return cols === 1 && /norm|ln\d|bias/.test(name) ? [rows] : [rows, cols]
}
